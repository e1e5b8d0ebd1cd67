// wire.h: the bytes that fabrics hand to each other: addresses, region keys and the header of engine messages.
// Parsing takes hostile bytes: every length is bounded, a checksum finds damage, nothing is believed further than that.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "asyncfabric/types.h"

namespace asyncfabric {

struct AddressBlob {
  struct RailPart {
    std::string protocol;  // provider name without "fault+": rails of one protocol can talk
    std::string address;
  };
  uint64_t incarnation = 0;
  uint64_t host = 0;  // hash of boot id, pid and net namespace and user: equal only where shared memory works
  std::vector<RailPart> rails;
};

struct KeyBlob {
  uint64_t incarnation = 0;
  RegionId region = 0;
  uint64_t generation = 0;
  uint64_t offset = 0;  // of the key's range inside the registered memory
  uint64_t length = 0;
  uint32_t access = 0;
  std::vector<std::string> rail_keys;  // one per rail of the owner
  std::string address;                 // owner's AddressBlob, encoded
};

std::string encode_address(const AddressBlob& blob);
bool decode_address(std::string_view bytes, AddressBlob* out);
std::string encode_key(const KeyBlob& blob);
bool decode_key(std::string_view bytes, KeyBlob* out);

// Engine messages: two-sided, small, over lane 0 or the lane they are about.
enum class MessageType : uint8_t {
  kHello = 1,    // value = lane | sender's life << 32; payload: see Greeting in handshake.cc
  kWelcome = 2,  // value likewise; payload = a slice of the counter generations, see generations.h
  kReject = 3,   // value = the incarnation that was looked for: the address belongs to a later process
  kPing = 4,
  kPong = 5,
  kUser =
      6,  // value = number of the first; payload = user messages with consecutive numbers, each behind its length (16 bits)
  kCredit = 7,     // value = user messages that were taken so far
  kClosed = 8,     // value = number of the list; payload = closings of your peer's counters, see closings.h
  kClosedAck = 9,  // value = number of the list that is confirmed; payload = two bytes, the lane and how many there are
  kBye = 10,
  kAskKey = 11,       // value = region; payload = generation, then a word to give back: is this key still good?
  kKeyVerdict = 12,   // value = the word; payload = one byte, 1: good
  kRevoked = 13,      // value = region; payload = first generation that is good, 0: none
  kAskCredit = 14,    // value = what we know was taken of our user messages: we wait for more
  kAskCounters = 15,  // value = imm; the slice of your counter generations that begins there?
  kCounters = 16,     // payload = that slice
  // Of fabrics with a secret, see admission.cc.
  kChallenge = 17,  // value as kHello's; payload = your nonce, mine, the lane that brings it (32 bits), a code
  kProof =
      18,  // value as kHello's; payload = your nonce, mine, lanes of yours that are admitted (64 bits), a slice, a code
  kRefused = 19,  // value = the incarnation that was looked for; payload = the hello's nonce, a SecretMismatch
};

// A life is one entry for a peer, from meeting it to losing it. One side may lose the other alone, and begin anew while the other still
// goes on with the old entry; so what was sent to an earlier life must not be taken by a later one.
struct MessageHeader {
  MessageType type = MessageType::kPing;
  uint64_t sender = 0;
  uint64_t target = 0;
  uint64_t value = 0;
  uint32_t life = 0;  // of the receiver's entry that it is meant for, in 24 bits; 0: the sender does not know it yet
};

constexpr uint32_t kMostLives = 0xfffffe;

constexpr size_t kHeaderBytes = 32;
constexpr size_t kUserHeadBytes = kHeaderBytes + sizeof(uint16_t);  // in front of the bytes of one user message
void encode_header(const MessageHeader& header, char* out);
bool decode_header(std::string_view bytes, MessageHeader* out, std::string_view* payload);

uint64_t host_identity();
uint64_t random_incarnation();

}  // namespace asyncfabric

// wire.h: the bytes that leave this process: a rail's address, a memory key, and the datagrams that set up queue pairs.
// Parsers take hostile bytes: exact lengths, known versions, a checksum for datagrams (they come from anybody). Pure, any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "providers/verbs/device/port.h"

namespace asyncfabric::verbs {

constexpr size_t kLanes = 2;  // of a connection: bulk, and small signals with the messages
constexpr size_t kBulkLane = 0;
constexpr size_t kSignalLane = 1;

// What a peer needs to talk to this rail's service queue pair.
struct RailAddress {
  uint64_t incarnation = 0;  // random, of the opened rail: a rail that took over the same queue pair number is not it
  uint32_t life = 1;         // grows with each opening of its device; what is below belongs to it
  Gid gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0;       // ibv_mtu
  uint8_t ethernet = 0;  // 1: RoCE; both ends must be the same
  uint32_t qpn = 0;
  uint32_t qkey = 0;
};

struct MemoryKey {
  uint64_t incarnation = 0;  // of the rail that registered it
  uint64_t base = 0;
  uint64_t length = 0;
  uint32_t access = 0;
  uint64_t id = 0;    // random, of the key
  uint32_t life = 0;  // of the device, that `rkey` belongs to; 0: none does
  uint32_t rkey = 0;
};

enum class DatagramKind : uint8_t {
  kRequest = 1,   // build the other ends of these queue pairs
  kReply = 2,     // they are ready to receive
  kRefusal = 3,   // they are not, and `code` (errno) is the reason; ESTALE: you look for a rail that is gone
  kBye = 4,       // the connection is over
  kByeReply = 5,  // understood
  kMoved = 6,     // the target of this connection has the address `sender` now: build it again there
  kAskKey = 7,    // which number has the key `key` now?
  kKey = 8,       // `number`, in the life of `sender`; `code` 0: there is no such key
};

struct QueueEnd {
  uint32_t qpn = 0;
  uint32_t psn = 0;
};

// One datagram carries both queue pairs. `attempt` grows with each (re)building of a connection; answers repeat it, so late ones
// are recognised. A repeated request gets the same answer again.
struct Datagram {
  DatagramKind kind = DatagramKind::kRequest;
  uint64_t target = 0;  // incarnation that is meant
  uint64_t connection = 0;
  uint32_t attempt = 0;
  uint8_t lanes = 0;  // bit mask: which queue pairs
  std::array<QueueEnd, kLanes> ends;
  uint16_t credits = 0;  // kReply: messages that may be under way
  uint16_t code = 0;
  uint64_t key = 0;
  uint32_t number = 0;
  RailAddress sender;
};

constexpr size_t kMaxDatagramBytes = 256;

std::string encode(const RailAddress& address);
std::string encode(const MemoryKey& key);
std::string encode(const Datagram& datagram);

bool parse(std::string_view bytes, RailAddress* out);
bool parse(std::string_view bytes, MemoryKey* out);
bool parse(std::string_view bytes, Datagram* out);

}  // namespace asyncfabric::verbs

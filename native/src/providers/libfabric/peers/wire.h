// wire.h: the bytes that leave this process: a rail's address, a memory key, and the head of a two-sided message.
// Parsers take hostile bytes: exact lengths, known versions, names of the form that libfabric expects.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace asyncfabric::libfabric {

constexpr size_t kMaxNameBytes = 128;  // of an endpoint

// Everything a peer needs to send to this rail.
struct RailAddress {
  uint32_t provider = 0;      // hash of libfabric's provider name: both ends must speak the same protocol
  uint64_t scratch_key = 0;   // a registered word that empty writes with an immediate may name
  uint64_t scratch_base = 0;  // its remote address: virtual, or 0 where addresses are offsets
  std::string name;           // fi_getname
};

struct MemoryKey {
  uint32_t provider = 0;
  uint32_t access = 0;
  uint64_t key = 0;
  uint64_t base = 0;  // remote address of the first byte: virtual, or 0
  uint64_t length = 0;
  uint64_t first = 0;  // which byte of the registered memory that is
};

// First bytes of every two-sided message of this provider.
enum class MessageKind : uint8_t {
  kPayload = 1,    // number: the sender's connection; the engine's bytes follow
  kIntroduce = 2,  // the sender's RailAddress follows: it may write to us from now on
  kFenceAsk = 3,   // number: answer when everything you wrote to me before this has left
  kFenceAnswer =
      4,  // number: of the ask, 0 behind an introduction. Behind the connection: our end of the stream that it leaves on
  kFenceGone = 5,  // that connection was closed by its sender
};
struct MessageHead {
  MessageKind kind = MessageKind::kPayload;
  uint64_t number = 0;
};
constexpr size_t kMessageHeadBytes = 16;

uint32_t provider_hash(std::string_view provider);

std::string encode(const RailAddress& address);
std::string encode(const MemoryKey& key);
void encode(const MessageHead& head, uint8_t* out);

bool parse(std::string_view bytes, RailAddress* out);
bool parse(std::string_view bytes, MemoryKey* out);
bool parse(const uint8_t* bytes, size_t length, MessageHead* out);

// Whether fi_av_insert may see `name`: it trusts the caller for its length.
bool valid_endpoint_name(std::string_view name, uint32_t address_format, size_t exact_bytes);

}  // namespace asyncfabric::libfabric

// wire.cc: little-endian encoders and strict parsers of wire.h. Pure functions, any thread.
#include "providers/libfabric/peers/wire.h"

#include <netinet/in.h>

#include <cstring>

#include "providers/libfabric/device/library.h"

namespace asyncfabric::libfabric {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is the memory format");

constexpr uint8_t kAddressMagic = 0xa7;
constexpr uint8_t kKeyMagic = 0xb7;
constexpr uint8_t kMessageMagic = 0xc7;
constexpr uint8_t kVersion = 2;

template <typename T>
void put(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Takes fields off the front; any shortage makes the whole parse fail.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  template <typename T>
  T take() {
    T value{};
    if (rest_.size() < sizeof value) {
      ok_ = false;
      return value;
    }
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_.remove_prefix(sizeof value);
    return value;
  }
  std::string_view rest() const { return rest_; }
  bool ok() const { return ok_; }

 private:
  std::string_view rest_;
  bool ok_ = true;
};

bool valid_socket_name(std::string_view name, int family, size_t bytes) {
  sockaddr_storage address{};
  if (name.size() != bytes) return false;
  std::memcpy(&address, name.data(), bytes);
  return address.ss_family == family;
}

}  // namespace

uint32_t provider_hash(std::string_view provider) {
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : provider) hash = (hash ^ static_cast<uint8_t>(c)) * 16777619u;
  return hash;
}

std::string encode(const RailAddress& address) {
  std::string out;
  put(&out, kAddressMagic);
  put(&out, kVersion);
  put(&out, address.provider);
  put(&out, address.scratch_key);
  put(&out, address.scratch_base);
  put(&out, static_cast<uint16_t>(address.name.size()));
  return out + address.name;
}

bool parse(std::string_view bytes, RailAddress* out) {
  Reader reader(bytes);
  const auto magic = reader.take<uint8_t>();
  const auto version = reader.take<uint8_t>();
  out->provider = reader.take<uint32_t>();
  out->scratch_key = reader.take<uint64_t>();
  out->scratch_base = reader.take<uint64_t>();
  const auto length = reader.take<uint16_t>();
  if (!reader.ok() || magic != kAddressMagic || version != kVersion) return false;
  if (length == 0 || length > kMaxNameBytes || reader.rest().size() != length) return false;
  out->name = reader.rest();
  return true;
}

std::string encode(const MemoryKey& key) {
  std::string out;
  put(&out, kKeyMagic);
  put(&out, kVersion);
  put(&out, key.provider);
  put(&out, key.access);
  put(&out, key.key);
  put(&out, key.base);
  put(&out, key.length);
  put(&out, key.first);
  return out;
}

bool parse(std::string_view bytes, MemoryKey* out) {
  Reader reader(bytes);
  const auto magic = reader.take<uint8_t>();
  const auto version = reader.take<uint8_t>();
  out->provider = reader.take<uint32_t>();
  out->access = reader.take<uint32_t>();
  out->key = reader.take<uint64_t>();
  out->base = reader.take<uint64_t>();
  out->length = reader.take<uint64_t>();
  out->first = reader.take<uint64_t>();
  if (!reader.ok() || !reader.rest().empty() || magic != kKeyMagic || version != kVersion) return false;
  return out->access <= 3 && out->base + out->length >= out->base &&  // no wrap around the address space
         out->first + out->length >= out->first;
}

void encode(const MessageHead& head, uint8_t* out) {
  std::memset(out, 0, kMessageHeadBytes);
  out[0] = kMessageMagic;
  out[1] = kVersion;
  out[2] = static_cast<uint8_t>(head.kind);
  std::memcpy(out + 8, &head.number, sizeof head.number);
}

bool parse(const uint8_t* bytes, size_t length, MessageHead* out) {
  if (length < kMessageHeadBytes || bytes[0] != kMessageMagic || bytes[1] != kVersion) return false;
  if (bytes[2] < static_cast<uint8_t>(MessageKind::kPayload) ||
      bytes[2] > static_cast<uint8_t>(MessageKind::kFenceGone))
    return false;
  out->kind = static_cast<MessageKind>(bytes[2]);
  std::memcpy(&out->number, bytes + 8, sizeof out->number);
  return true;
}

bool valid_endpoint_name(std::string_view name, uint32_t address_format, size_t exact_bytes) {
  if (name.empty() || name.size() > kMaxNameBytes) return false;
  if (exact_bytes != 0 && name.size() != exact_bytes) return false;
  switch (address_format) {
    case FI_SOCKADDR_IN: return valid_socket_name(name, AF_INET, sizeof(sockaddr_in));
    case FI_SOCKADDR_IN6: return valid_socket_name(name, AF_INET6, sizeof(sockaddr_in6));
    default: return exact_bytes != 0;  // an opaque format is taken only when its length is known
  }
}

}  // namespace asyncfabric::libfabric

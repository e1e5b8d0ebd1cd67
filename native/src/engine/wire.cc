// wire.cc: see wire.h.
#include "engine/wire.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

#include "base/bytes.h"
#include "base/clock.h"

namespace asyncfabric {

namespace {

constexpr uint32_t kAddressMagic = 0x31414641;  // "AFA1"
constexpr uint32_t kKeyMagic = 0x314b4641;      // "AFK1"
constexpr uint32_t kMessageMagic = 0x324d4641;  // "AFM2"
constexpr size_t kMaxRails = 32;
constexpr size_t kMaxRailBytes = 512;

std::string seal(ByteWriter& writer) {
  writer.put(checksum(writer.text()));
  return std::move(writer.text());
}

// The body in front of a good checksum, or nothing.
std::string_view unseal(std::string_view bytes, size_t limit) {
  if (bytes.size() < 8 || bytes.size() > limit) return {};
  const std::string_view body = bytes.substr(0, bytes.size() - 8);
  ByteReader tail(bytes.substr(body.size()));
  return tail.get<uint64_t>() == checksum(body) ? body : std::string_view{};
}

}  // namespace

std::string encode_address(const AddressBlob& blob) {
  ByteWriter writer;
  writer.put(kAddressMagic);
  writer.put(blob.incarnation);
  writer.put(blob.host);
  writer.put(static_cast<uint8_t>(blob.rails.size()));
  for (const AddressBlob::RailPart& rail : blob.rails) {
    writer.put_string<uint8_t>(rail.protocol);
    writer.put_string<uint16_t>(rail.address);
  }
  return seal(writer);
}

bool decode_address(std::string_view bytes, AddressBlob* out) {
  ByteReader reader(unseal(bytes, kMaxAddressBytes));
  if (reader.get<uint32_t>() != kAddressMagic) return false;
  out->incarnation = reader.get<uint64_t>();
  out->host = reader.get<uint64_t>();
  const size_t rails = reader.get<uint8_t>();
  if (rails == 0 || rails > kMaxRails || out->incarnation == 0) return false;
  out->rails.clear();
  for (size_t i = 0; i < rails; ++i) {
    const std::string_view protocol = reader.get_string<uint8_t>();
    const std::string_view address = reader.get_string<uint16_t>();
    if (!reader.ok() || protocol.empty() || protocol.size() > 32 || address.size() > kMaxRailBytes) return false;
    out->rails.push_back({std::string(protocol), std::string(address)});
  }
  return reader.done();
}

std::string encode_key(const KeyBlob& blob) {
  ByteWriter writer;
  writer.put(kKeyMagic);
  writer.put(blob.incarnation);
  writer.put(blob.region);
  writer.put(blob.generation);
  writer.put(blob.offset);
  writer.put(blob.length);
  writer.put(static_cast<uint8_t>(blob.access));
  writer.put(static_cast<uint8_t>(blob.rail_keys.size()));
  for (const std::string& key : blob.rail_keys) writer.put_string<uint8_t>(key);
  writer.put_string<uint16_t>(blob.address);
  return seal(writer);
}

bool decode_key(std::string_view bytes, KeyBlob* out) {
  ByteReader reader(unseal(bytes, kMaxKeyBytes));
  if (reader.get<uint32_t>() != kKeyMagic) return false;
  out->incarnation = reader.get<uint64_t>();
  out->region = reader.get<uint64_t>();
  out->generation = reader.get<uint64_t>();
  out->offset = reader.get<uint64_t>();
  out->length = reader.get<uint64_t>();
  out->access = reader.get<uint8_t>();
  const size_t rails = reader.get<uint8_t>();
  if (rails == 0 || rails > kMaxRails || out->incarnation == 0 || out->access > 3) return false;
  if (out->length > 1ull << 62 || out->offset > 1ull << 62) return false;
  out->rail_keys.clear();
  for (size_t i = 0; i < rails; ++i) out->rail_keys.emplace_back(reader.get_string<uint8_t>());
  out->address = std::string(reader.get_string<uint16_t>());
  AddressBlob owner;
  return reader.done() && decode_address(out->address, &owner) && owner.incarnation == out->incarnation &&
         owner.rails.size() == rails;
}

void encode_header(const MessageHeader& header, char* out) {
  ByteWriter writer;
  writer.put(kMessageMagic);
  writer.put(static_cast<uint32_t>(header.type) | header.life << 8);
  writer.put(header.sender);
  writer.put(header.target);
  writer.put(header.value);
  writer.text().copy(out, kHeaderBytes);
}

bool decode_header(std::string_view bytes, MessageHeader* out, std::string_view* payload) {
  ByteReader reader(bytes);
  if (reader.get<uint32_t>() != kMessageMagic) return false;
  const uint32_t word = reader.get<uint32_t>();
  const uint32_t type = word & 0xff;
  if (type < static_cast<uint32_t>(MessageType::kHello) || type > static_cast<uint32_t>(MessageType::kRefused))
    return false;
  out->type = static_cast<MessageType>(type);
  out->life = word >> 8;
  out->sender = reader.get<uint64_t>();
  out->target = reader.get<uint64_t>();
  out->value = reader.get<uint64_t>();
  *payload = reader.rest();
  return reader.ok() && out->sender != 0;
}

uint64_t host_identity() {
  std::string text;
  char buffer[256];
  if (FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r")) {
    if (const size_t got = fread(buffer, 1, sizeof buffer, file)) text.append(buffer, got);
    fclose(file);
  }
  for (const char* space : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    const ssize_t got = readlink(space, buffer, sizeof buffer);
    if (got > 0) text.append(buffer, static_cast<size_t>(got));
  }
  return checksum(text + std::to_string(getuid()));
}

uint64_t random_incarnation() {
  uint64_t value = 0;
  if (getrandom(&value, sizeof value, 0) != sizeof value) value = now_ns() ^ static_cast<uint64_t>(getpid()) << 40;
  return value == 0 ? 1 : value;
}

}  // namespace asyncfabric

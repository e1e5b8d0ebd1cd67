// wire.cc: see wire.h.
#include "providers/verbs/peers/wire.h"

#include "base/bytes.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint8_t kAddressMagic = 0xa9;
constexpr uint8_t kKeyMagic = 0xb9;
constexpr uint8_t kDatagramMagic = 0xd9;
constexpr uint8_t kVersion = 2;
constexpr uint32_t k24Bits = 0xffffff;

void put(ByteWriter* out, const RailAddress& address) {
  out->put(kAddressMagic);
  out->put(kVersion);
  out->put(address.incarnation);
  out->put(address.life);
  out->put_raw({reinterpret_cast<const char*>(address.gid.data()), address.gid.size()});
  out->put(address.lid);
  out->put(address.mtu);
  out->put(address.ethernet);
  out->put(address.qpn);
  out->put(address.qkey);
}

bool get(ByteReader* in, RailAddress* out) {
  const auto magic = in->get<uint8_t>();
  const auto version = in->get<uint8_t>();
  out->incarnation = in->get<uint64_t>();
  out->life = in->get<uint32_t>();
  for (uint8_t& byte : out->gid) byte = in->get<uint8_t>();
  out->lid = in->get<uint16_t>();
  out->mtu = in->get<uint8_t>();
  out->ethernet = in->get<uint8_t>();
  out->qpn = in->get<uint32_t>();
  out->qkey = in->get<uint32_t>();
  return in->ok() && magic == kAddressMagic && version == kVersion && out->mtu >= 1 && out->mtu <= 5 &&
         out->ethernet <= 1 && out->qpn != 0 && out->qpn <= k24Bits && (out->qkey >> 31) == 0;
}

}  // namespace

std::string encode(const RailAddress& address) {
  ByteWriter out;
  put(&out, address);
  return out.text();
}

bool parse(std::string_view bytes, RailAddress* out) {
  ByteReader in(bytes);
  return get(&in, out) && in.done();
}

std::string encode(const MemoryKey& key) {
  ByteWriter out;
  out.put(kKeyMagic);
  out.put(kVersion);
  out.put(key.incarnation);
  out.put(key.base);
  out.put(key.length);
  out.put(key.access);
  out.put(key.id);
  out.put(key.life);
  out.put(key.rkey);
  return out.text();
}

bool parse(std::string_view bytes, MemoryKey* out) {
  ByteReader in(bytes);
  const auto magic = in.get<uint8_t>();
  const auto version = in.get<uint8_t>();
  out->incarnation = in.get<uint64_t>();
  out->base = in.get<uint64_t>();
  out->length = in.get<uint64_t>();
  out->access = in.get<uint32_t>();
  out->id = in.get<uint64_t>();
  out->life = in.get<uint32_t>();
  out->rkey = in.get<uint32_t>();
  return in.done() && magic == kKeyMagic && version == kVersion && out->access <= 3 &&
         out->base + out->length >= out->base;  // no wrap around the address space
}

std::string encode(const Datagram& datagram) {
  ByteWriter out;
  out.put(kDatagramMagic);
  out.put(kVersion);
  out.put(static_cast<uint8_t>(datagram.kind));
  out.put(datagram.lanes);
  out.put(datagram.target);
  out.put(datagram.connection);
  out.put(datagram.attempt);
  for (const QueueEnd& end : datagram.ends) {
    out.put(end.qpn);
    out.put(end.psn);
  }
  out.put(datagram.credits);
  out.put(datagram.code);
  out.put(datagram.key);
  out.put(datagram.number);
  put(&out, datagram.sender);
  out.put(checksum(out.text()));
  return out.text();
}

bool parse(std::string_view bytes, Datagram* out) {
  if (bytes.size() < sizeof(uint64_t) || bytes.size() > kMaxDatagramBytes) return false;
  const std::string_view body = bytes.substr(0, bytes.size() - sizeof(uint64_t));
  ByteReader end(bytes.substr(body.size()));
  if (end.get<uint64_t>() != checksum(body)) return false;
  ByteReader in(body);
  const auto magic = in.get<uint8_t>();
  const auto version = in.get<uint8_t>();
  const auto kind = in.get<uint8_t>();
  out->kind = static_cast<DatagramKind>(kind);
  out->lanes = in.get<uint8_t>();
  out->target = in.get<uint64_t>();
  out->connection = in.get<uint64_t>();
  out->attempt = in.get<uint32_t>();
  bool valid = true;
  for (QueueEnd& queue : out->ends) {
    queue.qpn = in.get<uint32_t>();
    queue.psn = in.get<uint32_t>();
    valid = valid && queue.qpn <= k24Bits && queue.psn <= k24Bits;
  }
  out->credits = in.get<uint16_t>();
  out->code = in.get<uint16_t>();
  out->key = in.get<uint64_t>();
  out->number = in.get<uint32_t>();
  valid = get(&in, &out->sender) && valid;
  return valid && in.done() && magic == kDatagramMagic && version == kVersion &&
         kind >= static_cast<uint8_t>(DatagramKind::kRequest) && kind <= static_cast<uint8_t>(DatagramKind::kKey) &&
         out->lanes < 1u << kLanes;
}

}  // namespace asyncfabric::verbs

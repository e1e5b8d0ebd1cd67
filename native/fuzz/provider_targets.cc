// provider_targets.cc: what rails read of each other over the network and between processes: addresses, keys, datagrams, heads of
// messages, and the options of rails, which programs pass in.
#include "base/bytes.h"
#include "providers/fault/fault_plan.h"
#include "providers/local/memory/regions.h"
#include "providers/local/options.h"
#include "providers/local/peers/identity.h"
#include "target.h"
#ifdef ASYNCFABRIC_WITH_LIBFABRIC
#include "providers/libfabric/device/library.h"
#include "providers/libfabric/peers/wire.h"
#endif
#ifdef ASYNCFABRIC_WITH_VERBS
#include "providers/verbs/options.h"
#include "providers/verbs/peers/wire.h"
#endif

namespace asyncfabric::fuzz {
namespace {

using Seeds = std::vector<std::string>;

void read_local(std::string_view bytes) {
  local::RailAddress address;
  if (local::decode_address(bytes, &address).ok())
    require(local::encode_address(address) == bytes, "a local address is its own encoding");
  local::RegionKey key;
  if (local::decode_key(bytes, &key).ok()) require(local::encode_key(key) == bytes, "a local key is its own encoding");
}

Seeds local_seeds() {
  local::RailAddress address;
  address.pid = 12;
  address.process_start = 34;
  address.rail_id = 56;
  address.socket = "asyncfabric-56";
  return {local::encode_address(address), local::encode_key({3, 7})};
}

// name=value, one in a line; the device is the first line.
RailSpec spec_of(std::string_view bytes) {
  RailSpec spec;
  spec.provider = "fault+local";
  spec.device = std::string(bytes.substr(0, bytes.find('\n')));
  for (size_t at = bytes.find('\n'); at != std::string_view::npos;) {
    const size_t end = bytes.find('\n', at + 1);
    const std::string_view line = bytes.substr(at + 1, end == std::string_view::npos ? end : end - at - 1);
    const size_t equals = line.find('=');
    if (equals != std::string_view::npos)
      spec.options.emplace_back(std::string(line.substr(0, equals)), std::string(line.substr(equals + 1)));
    at = end;
  }
  return spec;
}

void read_options(std::string_view bytes) {
  const RailSpec spec = spec_of(bytes);
  std::string detail;
  local::Options options;
  if (!local::parse_options(spec, &options, &detail).ok()) require(!detail.empty(), "a refusal gives its reason");
  FaultPlan plan;
  RailSpec inner;
  detail.clear();
  if (!parse_fault_spec(spec, &plan, &inner, &detail).ok()) require(!detail.empty(), "a refusal gives its reason");
#ifdef ASYNCFABRIC_WITH_VERBS
  verbs::Options verbs;
  detail.clear();
  if (!verbs::parse_options(spec, &verbs, &detail).ok()) require(!detail.empty(), "a refusal gives its reason");
#endif
}

Seeds option_seeds() {
  return {"\ncopy=nt\nforeign=cma\ntracer=any\ncopiers=4\nring=64", "mlx5_0\nport=1\ngid=3\nmtu=1024\ndepth=64\nqps=1",
          "\nseed=3\nreorder=8\nerror_every=10\nhang=4", "\ngid=fe80::1\ntraffic_class=255\nrnr_retry=7\nsilence=100"};
}

#ifdef ASYNCFABRIC_WITH_LIBFABRIC
void read_libfabric(std::string_view bytes) {
  libfabric::RailAddress address;
  if (libfabric::parse(bytes, &address)) {
    require(libfabric::encode(address) == bytes, "a libfabric address is its own encoding");
    for (const uint32_t format : {FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_ADDR_EFA})
      for (const size_t exact : {size_t{0}, size_t{16}, size_t{28}, size_t{32}})
        if (libfabric::valid_endpoint_name(address.name, format, exact))
          require(exact == 0 || address.name.size() == exact, "a name has the length that libfabric reads");
  }
  libfabric::MemoryKey key;
  if (libfabric::parse(bytes, &key)) require(libfabric::encode(key) == bytes, "a libfabric key is its own encoding");
  libfabric::MessageHead head;
  if (libfabric::parse(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(), &head))
    require(head.kind >= libfabric::MessageKind::kPayload && head.kind <= libfabric::MessageKind::kFenceGone,
            "a head has a known kind");
}

Seeds libfabric_seeds() {
  std::string name(16, '\0');
  name[0] = 2;  // AF_INET
  uint8_t head[libfabric::kMessageHeadBytes];
  libfabric::encode(libfabric::MessageHead{libfabric::MessageKind::kFenceAsk, 5}, head);
  return {libfabric::encode(libfabric::RailAddress{7, 1, 2, name}),
          libfabric::encode(libfabric::MemoryKey{7, 3, 5, 4096, 8192}),
          std::string(reinterpret_cast<char*>(head), sizeof head)};
}
#endif

#ifdef ASYNCFABRIC_WITH_VERBS
void read_verbs(std::string_view bytes) {
  verbs::RailAddress address;
  if (verbs::parse(bytes, &address)) require(verbs::encode(address) == bytes, "a verbs address is its own encoding");
  verbs::MemoryKey key;
  if (verbs::parse(bytes, &key)) require(verbs::encode(key) == bytes, "a verbs key is its own encoding");
  verbs::Datagram datagram;
  if (verbs::parse(bytes, &datagram)) require(verbs::encode(datagram) == bytes, "a datagram is its own encoding");
}

Seeds verbs_seeds() {
  verbs::RailAddress address;
  address.incarnation = 7;
  address.mtu = 5;
  address.qpn = 17;
  address.qkey = 1;
  verbs::Datagram datagram;
  datagram.target = 9;
  datagram.lanes = 3;
  datagram.sender = address;
  return {verbs::encode(address), verbs::encode(verbs::MemoryKey{7, 4096, 8192, 3, 1, 1, 2}), verbs::encode(datagram)};
}

void seal_datagram_again(std::string* bytes) {
  if (bytes->size() < 8 || (*bytes)[0] != static_cast<char>(0xd9)) return;
  const uint64_t sum = checksum({bytes->data(), bytes->size() - 8});
  std::memcpy(bytes->data() + bytes->size() - 8, &sum, sizeof sum);
}
#endif

}  // namespace

std::vector<Target> provider_targets() {
  return {
      {"local.address", read_local, local_seeds},
      {"options", read_options, option_seeds},
#ifdef ASYNCFABRIC_WITH_LIBFABRIC
      {"libfabric.wire", read_libfabric, libfabric_seeds},
#endif
#ifdef ASYNCFABRIC_WITH_VERBS
      {"verbs.wire", read_verbs, verbs_seeds, seal_datagram_again},
#endif
  };
}

}  // namespace asyncfabric::fuzz

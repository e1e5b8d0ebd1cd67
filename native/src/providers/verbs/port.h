// port.h: which GID of a port to speak from. Reads the kernel's table under /sys/class/infiniband, whose types
// (RoCE v1, RoCE v2) libibverbs of older rdma-core does not tell. Opening thread; a pure function of a directory tree.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace asyncfabric::verbs {

using Gid = std::array<uint8_t, 16>;

struct GidChoice {
  uint32_t index = 0;
  Gid gid{};
  std::string type;  // "RoCE v2", "IB/RoCE v1"
};

constexpr const char* kSysfsRoot = "/sys/class/infiniband";

// The best of the first `table` entries: RoCE v2 over IPv4, RoCE v2 over a routable IPv6 address, RoCE v2 link-local, RoCE v1;
// on InfiniBand the first entry. `wanted` >= 0 takes that entry or fails. False: `detail` says why.
bool choose_gid(const std::string& root, const std::string& device, uint32_t port, uint32_t table, bool ethernet,
                int32_t wanted, GidChoice* out, std::string* detail);

}  // namespace asyncfabric::verbs

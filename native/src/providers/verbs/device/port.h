// port.h: which GID of a port to speak from, and how fast the port is. Reads the kernel's tables under /sys/class, whose GID types (RoCE
// v1, RoCE v2), interfaces and rates libibverbs of older rdma-core does not know. Opening and service thread; pure functions of a tree.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace asyncfabric::verbs {

using Gid = std::array<uint8_t, 16>;

struct GidChoice {
  uint32_t index = 0;
  Gid gid{};
  std::string type;    // "RoCE v2", "IB/RoCE v1"
  std::string netdev;  // its interface, "" when unknown
  bool up = true;      // that interface is up, as far as is known
  bool vlan = false;   // it is one of a VLAN

  std::string text() const;  // "3 (RoCE v2, 10.0.0.5 on eth1)"
};

// What the option gid= asks for; nothing: the best one.
struct GidWish {
  int32_t index = -1;   // an entry of the table
  bool by_gid = false;  // an address
  Gid gid{};
  std::string netdev;  // an interface
  std::string type;    // with an address: of this type only, "" for any

  bool asked() const { return index >= 0 || by_gid || !netdev.empty(); }
};

constexpr const char* kSysfsRoot = "/sys/class";

// "3", "10.0.0.5", "fe80::1" or "eth1". False: none of these.
bool parse_gid_wish(const std::string& text, GidWish* out);

// The best entry among the first `table` that the wish allows. Better is, in this order: an interface that is up; RoCE v2; IPv4, then
// routable IPv6, then link-local; no VLAN; a lower index. On InfiniBand the first entry. False: `detail` is the reason.
bool choose_gid(const std::string& root, const std::string& device, uint32_t port, uint32_t table, bool ethernet,
                const GidWish& wish, GidChoice* out, std::string* detail);

// Of the port, in Gbit/s; 0: unknown. XDR does not fit into the 8 bits that libibverbs has for a speed.
double rate_of_port(const std::string& root, const std::string& device, uint32_t port);

}  // namespace asyncfabric::verbs

// nics.cc: RDMA devices (class/infiniband: InfiniBand, RoCE, EFA, iWARP, software ones) and the network interfaces that
// belong to no RDMA device. Interfaces without hardware behind them (lo, veth, bridges, bonds) are no NICs.
#include <algorithm>
#include <set>

#include "topology/devices.h"
#include "topology/pci.h"

namespace asyncfabric::topology {
namespace {

constexpr int64_t kRnicNode = 4;  // node_type of iWARP devices
constexpr int64_t kAmazon = 0x1d0f;

// "400 Gb/sec (4X NDR)", "2.5 Gb/sec (1X SDR)"
double gbits_of(const std::string& rate) {
  const size_t end = rate.find(" Gb/sec");
  if (end == std::string::npos || end > 8) return 0;
  const std::optional<int64_t> whole = parse_number(rate.substr(0, std::min(rate.find('.'), end)));
  if (!whole || *whole < 0) return 0;
  const size_t point = rate.find('.');
  const bool half = point < end && rate.compare(point, 2, ".5") == 0;
  return static_cast<double>(*whole) + (half ? 0.5 : 0.0);
}

bool is_efa(const Tree& tree, const std::string& device) {
  return driver_of(tree, device) == "efa" || (tree.number(device + "/vendor").value_or(0) == kAmazon &&
                                              (tree.number(device + "/device").value_or(0) & 0xfff0) == 0xefa0);
}

// Also through the first port: the GID table names the interface where `parent` is missing.
std::string software_parent(const Tree& tree, const std::string& folder) {
  std::string parent = tree.text(folder + "/parent");
  if (parent.empty()) parent = tree.text(folder + "/ports/1/gid_attrs/ndevs/0");
  return parent.find('/') == std::string::npos ? parent : std::string();
}

void read_ports(const Tree& tree, const std::string& folder, Nic& nic, bool* ethernet) {
  bool any = false;
  for (const std::string& port : tree.names(folder + "/ports")) {
    const std::string at = folder + "/ports/" + port;
    const bool active = tree.text(at + "/state").starts_with("4");  // "4: ACTIVE"
    const double gbits = gbits_of(tree.text(at + "/rate"));
    // A port that is down still reports a rate, often the lowest one: only active ones state how fast the device is.
    if (active && (!nic.up || gbits > nic.gbits_per_s)) nic.gbits_per_s = gbits;
    nic.up = nic.up || active;
    if (active || !any) *ethernet = tree.text(at + "/link_layer") == "Ethernet";
    any = true;
  }
}

Nic read_rdma(const Tree& tree, const std::string& name, Notes& notes) {
  const std::string folder = "sys/class/infiniband/" + name;
  Nic nic;
  nic.name = name;
  bool ethernet = false;
  read_ports(tree, folder, nic, &ethernet);
  nic.kind = ethernet ? NicKind::kRoce : NicKind::kInfiniBand;
  const std::string type = tree.text(folder + "/node_type");
  if (parse_number(type.substr(0, type.find(':'))) == kRnicNode) nic.kind = NicKind::kIwarp;
  nic.software = !tree.exists(folder + "/device");
  if (nic.software) {
    const std::string parent = software_parent(tree, folder);
    if (!parent.empty()) {
      nic.netdevs.push_back(parent);
      nic.place = place_of(tree, "sys/class/net/" + parent);
    }
    return nic;
  }
  nic.place = place_of(tree, folder + "/device");
  nic.netdevs = tree.names(folder + "/device/net");
  nic.virtual_function = tree.exists(folder + "/device/physfn/infiniband");
  if (is_efa(tree, folder + "/device")) nic.kind = NicKind::kEfa;
  if (nic.place.address.empty()) notes.push_back(name + ": an RDMA device without a place on PCI");
  return nic;
}

Nic read_interface(const Tree& tree, const std::string& name) {
  const std::string folder = "sys/class/net/" + name;
  Nic nic;
  nic.name = name;
  nic.place = place_of(tree, folder);
  if (nic.place.address.empty()) nic.place = place_of(tree, folder + "/device");
  nic.netdevs = {name};
  const std::string state = tree.text(folder + "/operstate");
  nic.up = state == "up" || state == "unknown";  // drivers that do not know it report unknown, and work
  const int64_t mbits = tree.number(folder + "/speed").value_or(0);  // -1, or unreadable, while it is down
  nic.gbits_per_s = mbits > 0 ? static_cast<double>(mbits) / 1000.0 : 0;
  nic.virtual_function = tree.exists(folder + "/device/physfn/net");
  return nic;
}

}  // namespace

std::vector<Nic> read_nics(const Tree& tree, Notes& notes) {
  std::vector<Nic> nics;
  std::set<std::string> taken;
  for (const std::string& name : tree.names("sys/class/infiniband")) {
    nics.push_back(read_rdma(tree, name, notes));
    if (!nics.back().software) taken.insert(nics.back().netdevs.begin(), nics.back().netdevs.end());
  }
  for (const std::string& name : tree.names("sys/class/net")) {
    if (taken.contains(name) || !tree.exists("sys/class/net/" + name + "/device")) continue;
    nics.push_back(read_interface(tree, name));
  }
  return nics;
}

}  // namespace asyncfabric::topology

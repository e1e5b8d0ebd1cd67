// topology.h: what a machine has of GPUs, NICs, NUMA nodes and CPUs, how far apart they are, and which serves which.
// Everything is a pure function of a directory tree with sys/ and proc/ in it: "/" is this machine, a copy is another one.
// Reading takes milliseconds of file access: never on the data path. Any thread; nothing is kept between calls.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace asyncfabric::topology {

constexpr int32_t kNoNode = -1;  // the machine does not report it, as virtual machines with flat PCI do not
constexpr int32_t kNoGpu = -1;
constexpr int32_t kNoCpu = -1;

// Where a device sits. `path` goes from the host bridge ("pci0000:00") over bridges and switch ports to the device itself;
// it is empty where the tree does not show it. The addresses are those of lspci -D.
struct Place {
  std::string address;
  std::vector<std::string> path;
  int32_t numa_node = kNoNode;
};

struct NumaNode {
  int32_t id = 0;
  std::vector<uint32_t> cpus;       // online ones
  std::vector<uint32_t> distances;  // to each node, in the order of Topology::nodes; 10 is local
  uint64_t memory_bytes = 0;
};

struct Gpu {
  Place place;
  uint32_t device_id = 0;  // PCI device, 0x2335 is an H200
  std::string driver;      // "" when no driver is bound
  std::string model;       // "NVIDIA H200", "" when the driver is not there to state it
};

enum class NicKind : uint32_t { kInfiniBand = 0, kRoce = 1, kEfa = 2, kIwarp = 3, kEthernet = 4 };

struct Nic {
  std::string name;  // of the RDMA device (mlx5_0), or of the network interface where there is no RDMA device
  NicKind kind = NicKind::kEthernet;
  Place place;
  std::vector<std::string> netdevs;
  double gbits_per_s = 0;  // 0: unknown
  bool up = false;
  bool software = false;          // rdma_rxe and siw: a protocol over somebody else's interface
  bool virtual_function = false;  // and the physical one is visible too
};

// How far apart two places are; smaller is closer.
enum class Distance : uint32_t {
  kSame = 0,         // one device, or two functions of one
  kSwitch = 1,       // below a common PCIe switch or port
  kRootComplex = 2,  // below a common host bridge
  kNode = 3,         // on one NUMA node
  kFar = 4,          // on different nodes, or nobody knows
};

// A GPU and the NICs that serve it, or, with kNoGpu, the host's memory and its NICs: what one worker thread drives.
struct Group {
  int32_t gpu = kNoGpu;        // index into Topology::gpus
  std::vector<uint32_t> nics;  // indices into Topology::nics
  int32_t numa_node = kNoNode;
  std::vector<uint32_t> cpus;   // allowed ones on that node; all allowed ones when there is none on it
  bool cpus_are_near = false;   // false: the process may not run on the NICs' node, or nobody knows it
  int32_t worker_cpu = kNoCpu;  // core to pin the worker to; kNoCpu: too few cores to give one away
};

struct Topology {
  std::vector<NumaNode> nodes;
  std::vector<uint32_t> allowed_cpus;  // online, and in the process's cpuset
  std::vector<Gpu> gpus;               // by PCI address, the order of CUDA_DEVICE_ORDER=PCI_BUS_ID
  std::vector<Nic> nics;               // RDMA devices first, each kind in natural order of names
  std::vector<Group> groups;           // one for each GPU; one for the host when there is no GPU
  std::vector<uint32_t> spare_nics;    // usable, but no GPU's: of another kind, or farther than what each GPU has
  std::vector<std::string> notes;      // what was odd and how it was taken
};

// `root` is "/" or a folder that holds a copy of sys/ and proc/. Never fails: what cannot be read is not there, or noted.
Topology read_topology(const std::string& root);

// Symmetric. Known and different NUMA nodes count more than a common host bridge, which every device of a flat virtual
// machine has; they do not count more than a common switch.
Distance distance_between(const Place& one, const Place& other);
const char* distance_name(Distance distance);

// The NICs by their distance to memory of a NUMA node, nearest first: for buffers of the host. kNoNode: in order.
std::vector<uint32_t> nics_for_node(const Topology& topology, int32_t numa_node);

}  // namespace asyncfabric::topology

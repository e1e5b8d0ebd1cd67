// gpus.cc: the GPUs whose memory a fabric can register: NVIDIA's, by PCI class. Displays of servers (ASPEED, virtio,
// Matrox) and integrated graphics have the same class and are none. Order: PCI address.
#include <algorithm>

#include "topology/devices.h"
#include "topology/pci.h"

namespace asyncfabric::topology {
namespace {

constexpr int64_t kNvidia = 0x10de;
constexpr int64_t kVgaController = 0x0300;  // class without the programming interface byte
constexpr int64_t k3dController = 0x0302;

// "Model: \t\t NVIDIA H200"
std::string model_of(const Tree& tree, const std::string& address) {
  constexpr std::string_view kKey = "Model:";
  const std::string text = tree.text("proc/driver/nvidia/gpus/" + address + "/information");
  for (const std::string_view line : split(text, '\n'))
    if (line.starts_with(kKey)) return std::string(trimmed(line.substr(kKey.size())));
  return {};
}

}  // namespace

std::vector<Gpu> read_gpus(const Tree& tree, Notes& notes) {
  std::vector<Gpu> gpus;
  for (const std::string& name : tree.names("sys/bus/pci/devices")) {
    if (!is_pci_address(name)) continue;
    const std::string folder = "sys/bus/pci/devices/" + name;
    const int64_t vendor = tree.number(folder + "/vendor").value_or(-1);
    const int64_t kind = tree.number(folder + "/class").value_or(-1) >> 8;
    if (vendor == 0xffff)
      notes.push_back(name + ": its vendor reads 0xffff, as of a device that fell off the bus: left out");
    if (vendor != kNvidia || (kind != kVgaController && kind != k3dController)) continue;
    Gpu gpu;
    gpu.place = place_of(tree, folder);
    if (gpu.place.address.empty()) gpu.place.address = name;
    gpu.device_id = static_cast<uint32_t>(tree.number(folder + "/device").value_or(0));
    gpu.driver = driver_of(tree, folder);
    gpu.model = model_of(tree, gpu.place.address);
    if (gpu.driver == "vfio-pci" || gpu.driver == "pci-stub") {
      notes.push_back(name + ": a GPU lent to a virtual machine (" + gpu.driver + "): left out");
      continue;
    }
    gpus.push_back(std::move(gpu));
  }
  // Addresses are hexadecimal: the natural order of names would put 9d before 43.
  std::sort(gpus.begin(), gpus.end(), [](const Gpu& one, const Gpu& other) {
    const std::string& here = one.place.address;
    const std::string& there = other.place.address;
    return here.size() != there.size() ? here.size() < there.size() : here < there;
  });
  return gpus;
}

}  // namespace asyncfabric::topology

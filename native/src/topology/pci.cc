// pci.cc: see pci.h.
#include "topology/pci.h"

#include <algorithm>

namespace asyncfabric::topology {
namespace {

constexpr std::string_view kSlotName = "PCI_SLOT_NAME=";

bool is_hex(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789abcdefABCDEF") == std::string_view::npos;
}

bool is_host_bridge(std::string_view name) {
  if (!name.starts_with("pci")) return false;
  const size_t colon = name.find(':');
  return colon != std::string_view::npos && is_hex(name.substr(3, colon - 3)) && is_hex(name.substr(colon + 1));
}

std::string slot_name(const Tree& tree, const std::string& folder) {
  const std::string events = tree.text(folder + "/uevent");
  for (const std::string_view line : split(events, '\n'))
    if (line.starts_with(kSlotName) && is_pci_address(line.substr(kSlotName.size())))
      return std::string(line.substr(kSlotName.size()));
  return {};
}

}  // namespace

bool is_pci_address(std::string_view name) {
  const size_t colon = name.find(':');
  if (colon == std::string_view::npos || colon < 4 || colon > 8 || name.size() != colon + 8) return false;
  return is_hex(name.substr(0, colon)) && is_hex(name.substr(colon + 1, 2)) && name[colon + 3] == ':' &&
         is_hex(name.substr(colon + 4, 2)) && name[colon + 6] == '.' && name[colon + 7] >= '0' &&
         name[colon + 7] <= '7';
}

std::string pci_folder(const Place& place) { return "sys/bus/pci/devices/" + place.address; }

Place place_of(const Tree& tree, const std::string& folder) {
  Place place;
  std::string real = tree.resolved(folder);
  if (real.find("/pci") == std::string::npos) {  // no link to follow, or one to a copy outside of devices/
    const std::string address = slot_name(tree, folder);
    if (!address.empty()) {
      const std::string better = tree.resolved("sys/bus/pci/devices/" + address);
      real = better.empty() ? "sys/bus/pci/devices/" + address : better;
    }
  }
  for (const std::string_view part : split(real, '/')) {
    if (is_host_bridge(part)) place.path.emplace_back(part);
    if (!is_pci_address(part)) continue;
    place.address = part;
    place.path.emplace_back(part);
  }
  if (place.address.empty()) return {};
  // Without its host bridge a path shows nothing about what two devices share.
  if (!is_host_bridge(place.path.front())) place.path.clear();
  const int64_t node = tree.number(pci_folder(place) + "/numa_node").value_or(kNoNode);
  place.numa_node = node < 0 || node > 1 << 16 ? kNoNode : static_cast<int32_t>(node);
  return place;
}

std::string driver_of(const Tree& tree, const std::string& folder) { return tree.link_name(folder + "/driver"); }

}  // namespace asyncfabric::topology

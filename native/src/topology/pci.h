// pci.h: places on the PCI tree out of sysfs, where the tree is the path of a device's own folder:
// devices/pci0000:15/0000:15:01.0/0000:16:00.0/... Odd trees: a copy without links has no path, only PCI_SLOT_NAME.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "asyncfabric/topology.h"
#include "topology/tree.h"

namespace asyncfabric::topology {

bool is_pci_address(std::string_view name);  // 0000:1b:00.0; domains may have up to 8 digits

// Of the PCI device that `folder` is, or is below of (virtio2/net/eth0); an empty one when there is none.
Place place_of(const Tree& tree, const std::string& folder);

std::string pci_folder(const Place& place);  // sys/bus/pci/devices/<address>
std::string driver_of(const Tree& tree, const std::string& folder);

}  // namespace asyncfabric::topology

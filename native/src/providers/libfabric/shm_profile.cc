// shm_profile.cc: libfabric's shared-memory provider, between processes of one host.
// It is here to compare with and for programs that must use libfabric; the `local` provider is faster.
#include <cstdlib>
#include <cstring>

#include "providers/libfabric/process.h"
#include "providers/libfabric/profile.h"

namespace asyncfabric::libfabric {
namespace {

void shape_hints(fi_info& hints) {
  // Without write-after-write order and with virtual addresses the provider takes a short cut: the writer stores into the
  // target by process_vm_writev and never looks at the key, so a revoked key would still write (INV-3). Asking for order
  // and for offsets makes the target fetch the bytes itself, after checking the key.
  hints.domain_attr->mr_mode &= ~FI_MR_VIRT_ADDR;
  hints.tx_attr->msg_order = FI_ORDER_WAW | FI_ORDER_SAW | FI_ORDER_WAS | FI_ORDER_SAS;
  hints.rx_attr->msg_order = hints.tx_attr->msg_order;
}

// A name of our own: it tells peers which process to watch, and later runs whose left-over segments to remove.
void shape_info(fi_info& info) {
  const std::string name = make_shm_name();
  std::free(info.src_addr);
  info.src_addr = strdup(name.c_str());
  info.src_addrlen = name.size() + 1;
}

}  // namespace

const Profile& shm_profile() {
  static const Profile profile{
      .name = "shm",
      .providers = {"shm"},
      .same_host_only = true,
      .endpoint_per_peer = true,
      .traps_dead_keys = true,
      .can_read = false,  // with 1.17 a read that is refused is never answered, and a trap would hand out zeros
      .shape_hints = shape_hints,
      .shape_info = shape_info,
  };
  return profile;
}

}  // namespace asyncfabric::libfabric

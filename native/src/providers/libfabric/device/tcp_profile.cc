// tcp_profile.cc: libfabric over TCP sockets. Works on every machine; the target's CPU places the bytes.
#include "providers/libfabric/device/profile.h"

namespace asyncfabric::libfabric {
namespace {

// A stream keeps its order, and a peer whose heartbeats stand behind more than it can send in peer_deadline would be called
// dead. 32 MiB are 0.3 s at 1 Gbit/s, and enough for 5 Gbit/s over a way round of 50 ms.
constexpr uint64_t kMostOpenBytes = 32ull << 20;

void shape_tcp_hints(fi_info& hints) {
  // A TCP stream keeps writes of one pair of endpoints in order; asking for it keeps later libraries honest.
  hints.tx_attr->msg_order = FI_ORDER_WAW | FI_ORDER_SAW | FI_ORDER_WAS | FI_ORDER_SAS;
  hints.rx_attr->msg_order = hints.tx_attr->msg_order;
}

}  // namespace

const Profile& tcp_profile() {
  static const Profile profile{
      .name = "tcp",
      .providers = {"net", "tcp;ofi_rxm", "tcp"},
      .binds_address = true,
      .default_address = "127.0.0.1",  // never listen to a network unless asked to
      .over_sockets = true,
      .wait_fd = true,
      .endpoint_per_peer = true,
      .acknowledged = true,
      .most_open_bytes = kMostOpenBytes,
      .fence_on_release = true,
      .shape_hints = shape_tcp_hints,
  };
  return profile;
}

}  // namespace asyncfabric::libfabric

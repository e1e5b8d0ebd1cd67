// verbs_profile.cc: libfabric over RC queue pairs (verbs;ofi_rxm), for InfiniBand and RoCE. It is here to compare with the `verbs`
// provider, which programs the same queue pairs itself, and for programs that must use libfabric.
// Two of the library's own settings matter, see settings.cc: its CQ is made for FI_UNIVERSE_SIZE peers at once, and its cache of
// registrations would keep closed keys alive.
#include <cerrno>

#include "providers/libfabric/device/profile.h"

namespace asyncfabric::libfabric {
namespace {

// Numbers of enum ibv_wc_status, which arrive as prov_errno; libfabric itself reports FI_EIO for most of them.
constexpr int kFlushed = 5;
constexpr int kRemoteInvalidRequest = 9;
constexpr int kRemoteAccess = 10;
constexpr int kRetriesExceeded = 12;

void shape_verbs_hints(fi_info& hints) {
  hints.addr_format = FI_SOCKADDR_IN;  // the GID of RoCE v2 over IPv4; link-local ones are listed too and reach nobody
  // One queue pair per pair of endpoints keeps writes in order, and an immediate behind them.
  hints.tx_attr->msg_order = FI_ORDER_WAW | FI_ORDER_SAW | FI_ORDER_WAS | FI_ORDER_SAS;
  hints.rx_attr->msg_order = hints.tx_attr->msg_order;
}

Status name_failure(int error, int provider_error) {
  switch (provider_error) {
    case kRemoteInvalidRequest:
    case kRemoteAccess:
      return {StatusCode::kStaleKey, provider_error};                // bounds and rights were checked before it left
    case kFlushed: return {StatusCode::kTransport, provider_error};  // behind the request that met the error
    case kRetriesExceeded:  // a dead peer, or a dead link to a living one: heartbeats show which
      return {StatusCode::kTransport, provider_error};
    default: return {StatusCode::kTransport, error};
  }
}

}  // namespace

const Profile& verbs_profile() {
  static const Profile profile{
      .name = "ofi-verbs",
      .providers = {"verbs;ofi_rxm"},
      .binds_address = true,
      // ofi_rxm 1.17 leaves a closed endpoint in the wait set of its CQ, and fi_trywait follows it. So this rail has no descriptor to
      // sleep on, and the worker naps.
      .wait_fd = false,
      .endpoint_per_peer = true,
      .acknowledged = true,
      .ask_every = 0,  // a completion of RC is the word of the target's NIC
      .keys_may_be_cached = true,
      .rebuilds_after_failure = true,
      // ofi_rxm 1.17 posts a receive again when it finds one that arrived while it closes the connection, on the endpoint that it has
      // just freed: a crash of the process, at either end. What was read before cannot be found. (Shared receives would be safe, but
      // over verbs they lose immediates.) A peer that is killed leaves no time: the `verbs` provider has nothing of this.
      .settle_ns = 50'000'000,
      .shape_hints = shape_verbs_hints,
      .name_failure = name_failure,
  };
  return profile;
}

}  // namespace asyncfabric::libfabric

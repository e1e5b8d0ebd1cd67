// efa_profile.cc: AWS Elastic Fabric Adapter, protocol SRD: reliable, unordered, no wait object (so no .wait_fd: the worker naps).
// Written from the documentation of the provider and of the library; it was never run on the hardware. Everything that can
// run without it is shared with tcp and shm, and the engine's side (unordered rail, this pace) is tested over the fault provider.
// What the shared code does for it: a write has one local and one remote segment, else the provider would emulate a write with
// immediate by sends (submit_write); an empty one names a registered word at both ends (scratch); CQ data must have 32 bits
// (control.cc); FI_EAGAIN until the first handshake waits in the backlog; one endpoint serves all peers, so disconnect() cannot
// flush and says so. Messages may overtake each other: the engine numbers them. Memory of GPUs is
// registered where the provider grants FI_HMEM (memory.cc).
#include <cstring>

#include "providers/libfabric/profile.h"

namespace asyncfabric::libfabric {
namespace {

// Options newer than the 1.17 headers, by their numbers in rdma/fi_endpoint.h. An older library answers that it does not know
// them, which is as good as having turned them off: there settings.cc turns the shm transfer off, and CUDA is never called
// unless FI_HMEM was asked for. Newer ones answer EOPNOTSUPP to the CUDA option only where device memory needs CUDA calls.
constexpr int kOptCudaApiPermitted = 10;       // FI_OPT_CUDA_API_PERMITTED, libfabric 1.18, bool
constexpr int kOptSharedMemoryPermitted = 11;  // FI_OPT_SHARED_MEMORY_PERMITTED, libfabric 1.19, bool

void shape_hints(fi_info& hints) {
  // SRD delivers in any order. Asking for an order would make the provider refuse, or emulate it in software.
  hints.tx_attr->msg_order = FI_ORDER_NONE;
  hints.rx_attr->msg_order = FI_ORDER_NONE;
}

bool turn_off(fid_ep* endpoint, int option, const char* name, std::string* detail) {
  const bool permitted = false;
  const int error = fi_setopt(&endpoint->fid, FI_OPT_ENDPOINT, option, &permitted, sizeof permitted);
  if (error == 0 || error == -FI_ENOPROTOOPT || error == -FI_EOPNOTSUPP || error == -FI_EINVAL) return true;
  *detail = std::string("the efa endpoint refused the option ") + name + " (" + std::strerror(-error) + ")";
  return false;
}

bool configure_endpoint(fid_ep* endpoint, std::string* detail) {
  // Peers of the same host have the `local` and `cuda` providers; a hidden second transport inside this rail would break
  // its accounting and its memory rules. CUDA calls on the data path would take the driver's lock.
  return turn_off(endpoint, kOptSharedMemoryPermitted, "FI_OPT_SHARED_MEMORY_PERMITTED", detail) &&
         turn_off(endpoint, kOptCudaApiPermitted, "FI_OPT_CUDA_API_PERMITTED", detail);
}

}  // namespace

const Profile& efa_profile() {
  static const Profile profile{
      .name = "efa",
      .providers = {"efa"},
      .eager_posts = 1,
      .posts_per_pass = 32,  // flooding the device lowers the rate of small packets
      .name_bytes = 32,      // GID, queue pair number, queue key
      // Registrations of an application that promised FI_MR_LOCAL are not cached, say its sources: asked, not believed.
      .gpu_memory = true,
      .keys_may_be_cached = true,
      .shape_hints = shape_hints,
      .configure_endpoint = configure_endpoint,
  };
  return profile;
}

}  // namespace asyncfabric::libfabric

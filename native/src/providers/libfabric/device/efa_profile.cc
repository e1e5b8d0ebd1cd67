// efa_profile.cc: AWS Elastic Fabric Adapter, protocol SRD: reliable, unordered, no wait object (so no .wait_fd: the worker naps).
// Written from the documentation of the provider and of the library; it was never run on the hardware. Everything that can
// run without it is shared with tcp, and the engine's side (unordered rail, these limits of posting) is tested over the fault provider.
// What the shared code does for it: a write has one local and one remote segment, else the provider would emulate a write with
// immediate by sends (submit_write); an empty one names a registered word at both ends (scratch); CQ data must have 32 bits
// (control.cc); FI_EAGAIN until the first handshake waits in the backlog; one endpoint serves all peers, so disconnect() cannot
// flush and shows it. Messages may overtake each other: the engine numbers them. Memory of GPUs is
// registered where the provider grants FI_HMEM (memory.cc).
#include <cstring>

#include "providers/libfabric/device/profile.h"

namespace asyncfabric::libfabric {
namespace {

// Options newer than the 1.17 headers, by their numbers in rdma/fi_endpoint.h and rdma/fi_ext.h. An older library answers that it does
// not know them, which is as good as having turned them off: there settings.cc turns the shm transfer off, and CUDA is never called
// unless FI_HMEM was asked for.
constexpr int kOptCudaApiPermitted = 10;               // FI_OPT_CUDA_API_PERMITTED, libfabric 1.18, bool
constexpr int kOptSharedMemoryPermitted = 11;          // FI_OPT_SHARED_MEMORY_PERMITTED, libfabric 1.19, bool
constexpr int kOptEmulatedWrite = -(0xefa << 16) + 2;  // FI_OPT_EFA_EMULATED_WRITE, libfabric 1.18, bool, to be read

void shape_efa_hints(fi_info& hints) {
  // SRD delivers in any order. Asking for an order would make the provider refuse, or emulate it in software.
  hints.tx_attr->msg_order = FI_ORDER_NONE;
  hints.rx_attr->msg_order = FI_ORDER_NONE;
}

int turn_off(fid_ep* endpoint, int option) {
  const bool permitted = false;
  const int error = fi_setopt(&endpoint->fid, FI_OPT_ENDPOINT, option, &permitted, sizeof permitted);
  return error == -FI_ENOPROTOOPT || error == -FI_EINVAL ? 0 : error;
}

// Peers of the same host have the `local` and `cuda` providers; a hidden second transport inside this rail would break its accounting and
// its memory rules. CUDA calls on the data path would take the driver's lock: EOPNOTSUPP means that device memory needs them, so this
// rail does without device memory.
bool configure_endpoint(fid_ep* endpoint, fi_info& info, std::string* detail) {
  const char* name = "FI_OPT_SHARED_MEMORY_PERMITTED";
  int error = turn_off(endpoint, kOptSharedMemoryPermitted);
  if (error == 0 || error == -FI_EOPNOTSUPP) {
    name = "FI_OPT_CUDA_API_PERMITTED";
    error = turn_off(endpoint, kOptCudaApiPermitted);
    if (error == -FI_EOPNOTSUPP) info.caps &= ~FI_HMEM;
  }
  if (error == 0 || error == -FI_EOPNOTSUPP) return true;
  *detail = std::string("the efa endpoint refused the option ") + name + " (" + std::strerror(-error) + ")";
  return false;
}

// An emulated write arrives in messages, and the target's library copies it into the region some time after it looked the key up: a
// region that was released meanwhile would still be written to. 1.17, which cannot be asked, emulates every write.
bool accept_endpoint(fid_ep* endpoint, const Library& library, std::string* detail) {
  bool emulated = true;
  size_t length = sizeof emulated;
  const int error = fi_getopt(&endpoint->fid, FI_OPT_ENDPOINT, kOptEmulatedWrite, &emulated, &length);
  if (error == 0 && !emulated) return true;
  *detail = "libfabric " + library.version + " (" + library.path + ") would emulate writes over efa by messages";
  if (error != 0)
    *detail += " (FI_OPT_EFA_EMULATED_WRITE: " + std::string(std::strerror(-error)) + "); 1.18 or newer is needed";
  else
    *detail += ": the device has no RDMA write, or FI_EFA_USE_DEVICE_RDMA=0 turns it off";
  *detail += ". Released memory could still be written to, so this rail does not open";
  return false;
}

}  // namespace

const Profile& efa_profile() {
  static const Profile profile{
      .name = "efa",
      .providers = {"efa"},
      .eager_posts = 1,
      .posts_per_pass = 32,  // flooding the device lowers the rate of small packets
      .name_bytes = 32,      // GID, queue pair number, queue key
      // Registrations of an application that promised FI_MR_LOCAL are not cached, by its sources: asked, not believed.
      .gpu_memory = true,
      .keys_may_be_cached = true,
      .ends_a_process_that_forks = true,
      .shape_hints = shape_efa_hints,
      .configure_endpoint = configure_endpoint,
      .accept_endpoint = accept_endpoint,
  };
  return profile;
}

}  // namespace asyncfabric::libfabric

// libfabric_loop.cc: the bare libfabric loop of the bench; see libfabric_loop.h. One thread, one endpoint, one CQ, one
// region, completions counted, nothing else: this is the limit that the rail and the engine are measured against.
#include "bench/libfabric_loop.h"

#include <sys/mman.h>

#include <cstdlib>

#include "providers/libfabric/device/library.h"
#include "providers/libfabric/device/profile.h"

namespace asyncfabric::bench {
namespace {

using libfabric::Info;
using libfabric::Library;

constexpr uint64_t kKey = 0x5eed;
constexpr size_t kReap = 64;

struct Hello {  // what the two sides send each other
  uint32_t name_bytes = 0;
  uint64_t key = 0;
  uint64_t base = 0;
  char name[128] = {};
};

struct Side : bare::End {
  static constexpr uint32_t kMostInFlight = 1024;
  static constexpr uint64_t kChain = 1;  // every write has its completion

  const Library* library = nullptr;
  Info info;
  fid_fabric* fabric = nullptr;
  fid_domain* domain = nullptr;
  fid_cq* cq = nullptr;
  fid_av* av = nullptr;
  fid_ep* ep = nullptr;
  fid_mr* mr = nullptr;
  void* desc = nullptr;
  fi_addr_t peer = FI_ADDR_UNSPEC;
  uint64_t remote_key = 0;
  uint64_t remote_base = 0;
  fi_context2 contexts[kMostInFlight] = {};

  using End::End;
  ~Side() {
    if (ep != nullptr) fi_close(&ep->fid);
    if (mr != nullptr) fi_close(&mr->fid);
    if (av != nullptr) fi_close(&av->fid);
    if (cq != nullptr) fi_close(&cq->fid);
    if (domain != nullptr) fi_close(&domain->fid);
    if (fabric != nullptr) fi_close(&fabric->fid);
    if (region != nullptr) munmap(region, config.region_bytes);
  }

  int fail(const char* what, int error) const {
    return End::fail(what, std::abs(error), library != nullptr ? library->fi_strerror(std::abs(error)) : nullptr);
  }

  int open() {
    const libfabric::Profile* profile = libfabric::find_profile(config.profile);
    if (profile == nullptr) return fail("unknown profile", EINVAL);
    library = libfabric::open_library(config.library, &result->error);
    if (library == nullptr) return ENOENT;
    info = libfabric::select_info(*library, *profile, {config.provider, config.address, ""}, &result->error);
    if (!info) return ENODEV;
    result->provider = info->fabric_attr->prov_name;
    result->library = library->path;
    fi_cq_attr cq_attr{};
    cq_attr.size = 4096;
    cq_attr.format = FI_CQ_FORMAT_DATA;
    cq_attr.wait_obj = FI_WAIT_NONE;
    fi_av_attr av_attr{};
    int error = library->fi_fabric(info->fabric_attr, &fabric, nullptr);
    if (error == 0) error = fi_domain(fabric, info.get(), &domain, nullptr);
    if (error == 0) error = fi_cq_open(domain, &cq_attr, &cq, nullptr);
    if (error == 0) error = fi_av_open(domain, &av_attr, &av, nullptr);
    if (error == 0) error = fi_endpoint(domain, info.get(), &ep, nullptr);
    if (error == 0 && profile->configure_endpoint != nullptr &&
        !profile->configure_endpoint(ep, *info.get(), &result->error))
      return EINVAL;
    if (error == 0) error = fi_ep_bind(ep, &av->fid, 0);
    if (error == 0) error = fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV);
    if (error == 0) error = fi_enable(ep);
    if (error != 0) return fail("opening the endpoint", error);
    return register_region();
  }

  int register_region() {
    region = bare::map_region(config.region_bytes);
    if (region == nullptr) return fail("mapping the region", errno);
    const uint64_t access = FI_WRITE | FI_READ | FI_REMOTE_WRITE | FI_REMOTE_READ;
    int error = fi_mr_reg(domain, region, config.region_bytes, access, 0, kKey, 0, &mr, nullptr);
    if (error == 0 && (info->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
      error = fi_mr_bind(mr, &ep->fid, 0);
      if (error == 0) error = fi_mr_enable(mr);
    }
    if (error != 0) return fail("registering the region", error);
    desc = fi_mr_desc(mr);
    return 0;
  }

  int meet() {
    Hello mine;
    Hello theirs;
    size_t size = sizeof mine.name;
    int error = fi_getname(&ep->fid, mine.name, &size);
    if (error != 0) return fail("fi_getname", error);
    mine.name_bytes = static_cast<uint32_t>(size);
    mine.key = fi_mr_key(mr);
    mine.base = (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uint64_t>(region) : 0;
    if (!bare::send_all(control, &mine, sizeof mine) || !bare::receive_all(control, &theirs, sizeof theirs))
      return fail("the other side is gone", EPIPE);
    remote_key = theirs.key;
    remote_base = theirs.base;
    return fi_av_insert(av, theirs.name, 1, &peer, 0, nullptr) == 1 ? 0 : fail("fi_av_insert", EINVAL);
  }

  int reap() {  // also drives the progress of providers that have none of their own
    fi_cq_data_entry entries[kReap];
    const ssize_t count = fi_cq_read(cq, entries, kReap);
    if (count == -FI_EAGAIN) return 0;
    if (count < 0) {
      libfabric::CompletionError error;
      (void)fi_cq_readerr(cq, &error.known, 0);
      return fail("a completion failed", error.known.err);
    }
    for (ssize_t i = 0; i < count; ++i) {
      if ((entries[i].flags & FI_REMOTE_CQ_DATA) != 0)
        ++came;
      else
        ++sent;
    }
    return 0;
  }

  int write(uint64_t at, uint64_t bytes, bool with_imm, uint64_t slot, uint64_t) {
    for (;;) {
      void* context = &contexts[slot % kMostInFlight];
      const ssize_t posted =
          with_imm ? fi_writedata(ep, region + at, bytes, desc, slot, peer, remote_base + at, remote_key, context)
                   : fi_write(ep, region + at, bytes, desc, peer, remote_base + at, remote_key, context);
      if (posted == 0) return 0;
      if (posted != -FI_EAGAIN) return fail("posting a write", static_cast<int>(posted));
      if (const int error = reap(); error != 0) return error;
    }
  }
};

}  // namespace

int libfabric_target(const LoopConfig& config, int control_fd, LoopResult* result) {
  return bare::target<Side>(config, control_fd, result);
}

int libfabric_initiator(const LoopConfig& config, int control_fd, LoopResult* result) {
  return bare::initiator<Side>(config, control_fd, result);
}

}  // namespace asyncfabric::bench

// device.cc: opening of the libfabric objects, in the order that libfabric demands. On the thread that opens the rail.
#include "providers/libfabric/device/device.h"

#include <cerrno>
#include <cstring>

#include "base/descriptor_room.h"
#include "providers/libfabric/device/errors.h"
#include "providers/libfabric/device/signals.h"
#include "providers/libfabric/device/wait_fd.h"
#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::libfabric {
namespace {

constexpr size_t kCqEntries = 8192;  // more than contexts, receives and a burst of immediates

// rxm enters the queues of each endpoint into what its CQ waits for and never takes them out: the fi_trywait after the end of an endpoint
// calls into freed memory (seen with 1.17).
bool can_be_slept_on(const fi_info& info) { return std::strstr(info.fabric_attr->prov_name, "ofi_rxm") == nullptr; }

}  // namespace

Status Device::fail(const char* what, int error, std::string* detail) const {
  *detail = std::string(what) + " of libfabric's provider " + info_->fabric_attr->prov_name + " (" + library_.path +
            ") failed: " + library_.fi_strerror(error < 0 ? -error : error);
  if (descriptors_ran_out()) return {StatusCode::kNoMemory, EMFILE};
  return status_of_control(error < 0 ? -error : error);
}

Status Device::open(const Library& library, const Profile& profile, Info info, std::unique_ptr<Device>* out,
                    std::string* detail) {
  const KeepSignalHandlers keep;
  if (profile.ends_a_process_that_forks && !library.survives_fork) {
    *detail =
        "libfabric's provider " + std::string(info->fabric_attr->prov_name) + " (" + library.path +
        ") ends a process that forks: other code registered memory before this rail was opened, or this libibverbs "
        "cannot keep registered pages from a child; set FI_EFA_FORK_SAFE=1 before the process starts, or use Linux "
        "5.13 with rdma-core 35 or newer, which need nothing";
    return StatusCode::kUnsupported;
  }
  std::unique_ptr<Device> device(new Device(library, profile, std::move(info)));
  fid_fabric* fabric = nullptr;
  if (const int error = library.fi_fabric(device->info_->fabric_attr, &fabric, nullptr); error != 0)
    return device->fail("fi_fabric", error, detail);
  device->fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  if (const int error = fi_domain(fabric, device->info_.get(), &domain, nullptr); error != 0)
    return device->fail("fi_domain", error, detail);
  device->domain_.reset(domain);
  fi_av_attr attributes{};
  attributes.type = FI_AV_UNSPEC;
  fid_av* av = nullptr;
  if (const int error = fi_av_open(domain, &attributes, &av, nullptr); error != 0)
    return device->fail("fi_av_open", error, detail);
  device->av_.reset(av);
  if (const Status status = device->open_cq(detail); !status.ok()) return status;
  if (const Status status = device->open_endpoint(&device->endpoint_, detail); !status.ok()) return status;
  if (const Status status = device->read_name(detail); !status.ok()) return status;
  *out = std::move(device);
  return StatusCode::kOk;
}

Status Device::open_cq(std::string* detail) {
  fi_cq_attr attributes{};
  attributes.size = kCqEntries;
  attributes.format = FI_CQ_FORMAT_DATA;
  const bool sleeps = profile_.wait_fd && can_be_slept_on(*info_.get());
  attributes.wait_obj = sleeps ? FI_WAIT_FD : FI_WAIT_NONE;
  fid_cq* cq = nullptr;
  int error = fi_cq_open(domain_.get(), &attributes, &cq, nullptr);
  if (error != 0 && sleeps) {  // a provider forced by prov= may have none: the worker naps instead
    attributes.wait_obj = FI_WAIT_NONE;
    error = fi_cq_open(domain_.get(), &attributes, &cq, nullptr);
  }
  if (error != 0) return fail("fi_cq_open", error, detail);
  cq_.reset(cq);
  if (attributes.wait_obj == FI_WAIT_FD) wait_fd_ = find_wait_fd(library_, *info_.get(), cq);
  return StatusCode::kOk;
}

Status Device::open_endpoint(EndpointPtr* out, std::string* detail) const {
  const KeepSignalHandlers keep;
  fid_ep* endpoint = nullptr;
  if (const int error = fi_endpoint(domain_.get(), info_.get(), &endpoint, nullptr); error != 0)
    return fail("fi_endpoint", error, detail);
  EndpointPtr owned(endpoint);
  if (profile_.configure_endpoint != nullptr && !profile_.configure_endpoint(endpoint, *info_.get(), detail))
    return StatusCode::kUnsupported;
  if (const int error = fi_ep_bind(endpoint, &av_->fid, 0); error != 0)
    return fail("fi_ep_bind to the AV", error, detail);
  if (const int error = fi_ep_bind(endpoint, &cq_->fid, FI_TRANSMIT | FI_RECV); error != 0)
    return fail("fi_ep_bind to the CQ", error, detail);
  if (const int error = fi_enable(endpoint); error != 0) return fail("fi_enable", error, detail);
  if (profile_.accept_endpoint != nullptr && !profile_.accept_endpoint(endpoint, library_, detail))
    return StatusCode::kUnsupported;
  *out = std::move(owned);
  return StatusCode::kOk;
}

int Device::name_of(fid_ep& endpoint, std::string* out) {
  char name[kMaxNameBytes] = {};
  size_t size = sizeof name;
  const int error = fi_getname(&endpoint.fid, name, &size);
  out->assign(name, error == 0 ? size : 0);
  return error;
}

Status Device::read_name(std::string* detail) {
  if (const int error = name_of(*endpoint_, &name_); error != 0) return fail("fi_getname", error, detail);
  if (!valid_endpoint_name(name_, info_->addr_format, profile_.name_bytes)) {
    *detail =
        std::string("libfabric's provider ") + info_->fabric_attr->prov_name + " has endpoint names of an unknown form";
    return StatusCode::kUnsupported;
  }
  return StatusCode::kOk;
}

}  // namespace asyncfabric::libfabric

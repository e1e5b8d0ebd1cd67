// device.h: the libfabric objects of one opened rail: fabric, domain, CQ, AV, the endpoint that peers write to, and one more
// endpoint for each peer where the profile wants that. No traffic here. Shared with registrations, so that memory which the
// engine releases after the rail still has a domain to be released from.
#pragma once

#include <memory>
#include <string>

#include "asyncfabric/status.h"
#include "providers/libfabric/device/fids.h"
#include "providers/libfabric/device/profile.h"

namespace asyncfabric::libfabric {

class Device {
 public:
  static Status open(const Library& library, const Profile& profile, Info info, std::unique_ptr<Device>* out,
                     std::string* detail);

  // An enabled endpoint on the shared CQ and AV.
  Status open_endpoint(EndpointPtr* out, std::string* detail) const;
  void close_endpoint() { endpoint_.reset(); }

  const Library& library() const { return library_; }
  const Profile& profile() const { return profile_; }
  const fi_info& info() const { return *info_.get(); }
  uint32_t api() const { return info_->fabric_attr->api_version; }  // that the library was asked for
  fid_fabric* fabric() const { return fabric_.get(); }
  fid_domain* domain() const { return domain_.get(); }
  fid_cq* cq() const { return cq_.get(); }
  fid_av* av() const { return av_.get(); }
  fid_ep* endpoint() const { return endpoint_.get(); }
  int wait_fd() const { return wait_fd_; }  // -1: none
  bool needs(uint64_t mr_mode_bit) const {
    return (static_cast<uint64_t>(info_->domain_attr->mr_mode) & mr_mode_bit) != 0;
  }
  std::string endpoint_name() const { return name_; }
  static int name_of(fid_ep& endpoint, std::string* out);  // 0, or libfabric's error

 private:
  Device(const Library& library, const Profile& profile, Info info)
      : library_(library), profile_(profile), info_(std::move(info)) {}
  Status fail(const char* what, int error, std::string* detail) const;
  Status open_cq(std::string* detail);
  Status read_name(std::string* detail);

  const Library& library_;
  const Profile& profile_;
  Info info_;
  FabricPtr fabric_;  // members are destroyed from the last to the first: endpoint, CQ, AV, domain, fabric
  DomainPtr domain_;
  AvPtr av_;
  CqPtr cq_;
  EndpointPtr endpoint_;
  int wait_fd_ = -1;
  std::string name_;
};

}  // namespace asyncfabric::libfabric

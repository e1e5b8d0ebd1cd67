// fids.h: unique ownership of libfabric objects. The order of destruction is the owner's business.
#pragma once

#include <memory>

#include "providers/libfabric/device/library.h"

namespace asyncfabric::libfabric {

struct CloseFid {
  template <typename T>
  void operator()(T* object) const {
    (void)fi_close(&object->fid);
  }
};

using FabricPtr = std::unique_ptr<fid_fabric, CloseFid>;
using DomainPtr = std::unique_ptr<fid_domain, CloseFid>;
using CqPtr = std::unique_ptr<fid_cq, CloseFid>;
using AvPtr = std::unique_ptr<fid_av, CloseFid>;
using EndpointPtr = std::unique_ptr<fid_ep, CloseFid>;
using MrPtr = std::unique_ptr<fid_mr, CloseFid>;

}  // namespace asyncfabric::libfabric

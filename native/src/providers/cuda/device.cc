// device.cc: see device.h.
#include "providers/cuda/device.h"

namespace asyncfabric::cuda {

Status Device::open(int ordinal, std::shared_ptr<Device>* out, std::string* detail) {
  const Driver* driver = open_driver(detail);
  return driver != nullptr ? open(*driver, ordinal, out, detail) : StatusCode::kNoProvider;
}

Status Device::open(const Driver& opened, int ordinal, std::shared_ptr<Device>* out, std::string* detail) {
  const Driver* const driver = &opened;
  if (ordinal < 0 || ordinal >= driver->devices) {
    *detail = "cuda: there is no device " + std::to_string(ordinal) + "; this process sees " +
              std::to_string(driver->devices) + " GPU(s), numbered from 0";
    return StatusCode::kNoProvider;
  }
  std::shared_ptr<Device> device(new Device(*driver, ordinal));
  CUresult result = driver->cuDeviceGet(&device->handle_, ordinal);
  if (result == kSuccess) result = driver->cuDevicePrimaryCtxRetain(&device->context_, device->handle_);
  if (result != kSuccess) {
    device->context_ = nullptr;
    *detail = "cuda: device " + std::to_string(ordinal) + ": " + driver->complaint("cuDevicePrimaryCtxRetain", result);
    return {result == kOutOfMemory ? StatusCode::kNoMemory : StatusCode::kNoProvider, raw_of(result)};
  }
  driver->cuDeviceGetUuid(&device->uuid_, device->handle_);
  char name[128] = {};
  driver->cuDeviceGetName(name, sizeof name - 1, device->handle_);
  device->name_ = name;
  for (const auto& [which, what] : {std::pair{kAttributeUnifiedAddressing, "unified addressing"},
                                    {kAttributeHostPointerForRegistered, "host pointers of registered memory"},
                                    {kAttributeVmm, "virtual memory management"},
                                    {kAttributePosixHandles, "memory handles as file descriptors"},
                                    {kAttributeStreamMemOps64, "64-bit stream memory operations"}}) {
    if (device->attribute(which) != 0) continue;
    *detail = "cuda: device " + std::to_string(ordinal) + " (" + device->name_ + ") has no " + what;
    return StatusCode::kNoProvider;
  }
  device->ordering_ = device->attribute(kAttributeWritesOrdering);
  *out = std::move(device);
  return {};
}

// By the driver's documentation; no machine at hand has a NIC beside a GPU.
Status Device::flush_nic_writes() const {
  if (orders_nic_writes()) return {};
  if (driver_.cuFlushGPUDirectRDMAWrites == nullptr || (attribute(kAttributeFlushOptions) & kFlushByHost) == 0)
    return StatusCode::kUnsupported;
  const Scope scope(*this);
  return status(driver_.cuFlushGPUDirectRDMAWrites(kFlushCurrentContext, kFlushForOwner));
}

Device::~Device() {
  if (context_ != nullptr) driver_.cuDevicePrimaryCtxRelease_v2(handle_);
}

int Device::attribute(int which) const {
  int value = 0;
  return driver_.cuDeviceGetAttribute(&value, which, handle_) == kSuccess ? value : 0;
}

Status Device::status(CUresult result) {
  if (result == kSuccess) return {};
  return {result == kOutOfMemory ? StatusCode::kNoMemory : StatusCode::kTransport, raw_of(result)};
}

}  // namespace asyncfabric::cuda

// replaced_driver.h: as much of a driver for GPUs as opening a device needs, for tests that replace the calls which they look at.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "providers/cuda/device.h"

namespace asyncfabric::testing {

inline cuda::Driver driver_that_opens() {
  cuda::Driver driver;
  driver.devices = 1;
  driver.cuDeviceGet = [](cuda::CUdevice* device, int) { return *device = 0; };
  driver.cuDevicePrimaryCtxRetain = [](cuda::CUcontext*, cuda::CUdevice) { return cuda::kSuccess; };
  driver.cuDevicePrimaryCtxRelease_v2 = [](cuda::CUdevice) { return cuda::kSuccess; };
  driver.cuDeviceGetUuid = [](cuda::CUuuid*, cuda::CUdevice) { return cuda::kSuccess; };
  driver.cuDeviceGetName = [](char*, int, cuda::CUdevice) { return cuda::kSuccess; };
  driver.cuDeviceGetAttribute = [](int* value, int, cuda::CUdevice) {
    *value = 1;
    return cuda::kSuccess;
  };
  driver.cuCtxPushCurrent_v2 = [](cuda::CUcontext) { return cuda::kSuccess; };
  driver.cuCtxPopCurrent_v2 = [](cuda::CUcontext*) { return cuda::kSuccess; };
  return driver;
}

// Null after a failure that the test shows. The driver has to outlive the device.
inline std::shared_ptr<cuda::Device> open_device(const cuda::Driver& driver) {
  std::shared_ptr<cuda::Device> device;
  std::string detail;
  EXPECT_TRUE(cuda::Device::open(driver, 0, &device, &detail).ok()) << detail;
  return device;
}

}  // namespace asyncfabric::testing

// driver.cc: dlopen of libcuda, once per process. Runs on the thread that opens a rail.
#include "providers/cuda/driver.h"

#include <memory>

#include "base/shared_library.h"

namespace asyncfabric::cuda {
namespace {

constexpr const char* kName = "libcuda.so.1";

std::unique_ptr<Driver> load(const std::string& name, std::string* detail) {
  std::string why;
  void* handle = open_shared_library(name, &why);
  if (handle == nullptr) {
    *detail = "cuda: the NVIDIA driver's library could not be opened (" + why +
              "); it comes with the driver of a machine that has a GPU";
    return nullptr;
  }
  auto driver = std::make_unique<Driver>();
#define X(result, symbol, parameters)                                                        \
  driver->symbol = reinterpret_cast<decltype(driver->symbol)>(find_symbol(handle, #symbol)); \
  if (driver->symbol == nullptr) {                                                           \
    *detail = "cuda: " + name + " has no " #symbol ": a driver for CUDA 12 is needed";       \
    return nullptr;                                                                          \
  }
  ASYNCFABRIC_CUDA_SYMBOLS(X)
#undef X
  driver->cuMemcpyBatchAsync_v2 =
      reinterpret_cast<decltype(driver->cuMemcpyBatchAsync_v2)>(find_symbol(handle, "cuMemcpyBatchAsync_v2"));
  driver->cuMemGetHandleForAddressRange = reinterpret_cast<decltype(driver->cuMemGetHandleForAddressRange)>(
      find_symbol(handle, "cuMemGetHandleForAddressRange"));
  driver->cuFlushGPUDirectRDMAWrites =
      reinterpret_cast<decltype(driver->cuFlushGPUDirectRDMAWrites)>(find_symbol(handle, "cuFlushGPUDirectRDMAWrites"));
  driver->path = file_of_symbol(reinterpret_cast<void*>(driver->cuInit), name);
  if (const CUresult result = driver->cuInit(0); result != kSuccess) {
    *detail = "cuda: " + driver->complaint("cuInit", result) + ": no usable GPU in this process";
    return nullptr;
  }
  driver->cuDriverGetVersion(&driver->version);
  driver->cuDeviceGetCount(&driver->devices);
  if (driver->devices == 0) {
    *detail = "cuda: the driver shows no GPU to this process (look at CUDA_VISIBLE_DEVICES)";
    return nullptr;
  }
  return driver;
}

}  // namespace

std::string Driver::complaint(const char* call, CUresult result) const {
  const char* name = nullptr;
  if (cuGetErrorName(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  return std::string(call) + ": " + name + " (" + std::to_string(result) + ")";
}

const Driver* open_driver(std::string* detail) {
  static auto& drivers = *new LoadedLibraries<Driver>();  // never destroyed, like the library
  return drivers.open(kName, detail, load);
}

}  // namespace asyncfabric::cuda

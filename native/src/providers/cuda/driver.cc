// driver.cc: dlopen of libcuda, once per process. Runs on the thread that opens a rail.
#include "providers/cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

namespace asyncfabric::cuda {
namespace {

constexpr const char* kName = "libcuda.so.1";

std::string real_path(void* symbol) {
  Dl_info where{};
  if (dladdr(symbol, &where) == 0 || where.dli_fname == nullptr) return kName;
  std::unique_ptr<char, decltype(&std::free)> resolved(realpath(where.dli_fname, nullptr), std::free);
  return resolved ? resolved.get() : where.dli_fname;
}

std::unique_ptr<Driver> load(std::string* detail) {
  void* handle = dlopen(kName, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* why = dlerror();
    *detail = "cuda: the NVIDIA driver's library could not be opened (" + std::string(why != nullptr ? why : kName) +
              "); it comes with the driver of a machine that has a GPU";
    return nullptr;
  }
  auto driver = std::make_unique<Driver>();
#define X(result, symbol, parameters)                                                                \
  driver->symbol = reinterpret_cast<decltype(driver->symbol)>(dlsym(handle, #symbol));               \
  if (driver->symbol == nullptr) {                                                                   \
    *detail = "cuda: " + std::string(kName) + " has no " #symbol ": a driver for CUDA 12 is needed"; \
    return nullptr;                                                                                  \
  }
  ASYNCFABRIC_CUDA_SYMBOLS(X)
#undef X
  driver->cuMemcpyBatchAsync_v2 =
      reinterpret_cast<decltype(driver->cuMemcpyBatchAsync_v2)>(dlsym(handle, "cuMemcpyBatchAsync_v2"));
  driver->path = real_path(reinterpret_cast<void*>(driver->cuInit));
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
  static std::mutex mutex;
  static std::unique_ptr<Driver>& opened = *new std::unique_ptr<Driver>();  // never destroyed, like the library
  const std::lock_guard lock(mutex);
  if (opened == nullptr) opened = load(detail);  // a failure is not kept: the driver may be loaded later
  return opened.get();
}

}  // namespace asyncfabric::cuda

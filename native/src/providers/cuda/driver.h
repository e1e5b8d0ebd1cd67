// driver.h: the CUDA driver API as far as we use it: our own declarations (no CUDA header is needed to build), one list of symbols,
// opened with dlopen when the first cuda rail or doctor asks. Names and layouts are those of cuda.h 12; each symbol is named with
// its version, since the library exports old layouts under the plain names. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace asyncfabric::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUmemGenericAllocationHandle = unsigned long long;

constexpr CUresult kSuccess = 0;
// The raw number of a status for a result of the driver; lower ones are errno.
constexpr int32_t raw_of(CUresult result) { return 100'000 + result; }
constexpr CUresult kInvalidValue = 1;
constexpr CUresult kOutOfMemory = 2;
constexpr CUresult kPeerAccessAlreadyEnabled = 704;
constexpr CUresult kNotReady = 600;

constexpr int kAttributeUnifiedAddressing = 41;
constexpr int kAttributeHostPointerForRegistered = 91;
constexpr int kAttributeVmm = 102;
constexpr int kAttributePosixHandles = 103;
constexpr int kAttributeFlushOptions = 117;  // of writes by NICs: kFlushByHost or not
constexpr int kAttributeWritesOrdering = 118;
constexpr int kAttributeStreamMemOps64 = 122;
constexpr int kPointerMemoryType = 2;  // 1: host, 2: device
constexpr int kPointerOrdinal = 9;
constexpr int kPointerLegacyIpc = 10;
constexpr int kPointerHandleTypes = 14;
constexpr int kMemoryTypeDevice = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostPortable = 1;
constexpr unsigned kHostDeviceMap = 2;
constexpr unsigned kIpcLazyPeerAccess = 1;
constexpr unsigned kWaitGreaterOrEqual = 0;
constexpr int kDmaBufDescriptor = 1;
constexpr int kFlushByHost = 1;  // cuFlushGPUDirectRDMAWrites works
constexpr int kOrderedForOwner =
    100;  // kernels of that GPU see what NICs write in the order of its arrival; less: they may not
constexpr int kFlushCurrentContext = 0;
constexpr int kFlushForOwner = 100;
constexpr int kPosixDescriptor = 1;
constexpr int kLocationDevice = 1;
constexpr int kAllocationPinned = 1;
constexpr int kGranularityRecommended = 1;
constexpr int kAccessReadWrite = 3;

struct CUuuid {
  unsigned char bytes[16];
};
struct CUipcMemHandle {
  char reserved[64];
};
struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};

// X(return type, symbol, parameters)
#define ASYNCFABRIC_CUDA_SYMBOLS(X)                                                                                 \
  X(CUresult, cuInit, (unsigned))                                                                                   \
  X(CUresult, cuDriverGetVersion, (int*))                                                                           \
  X(CUresult, cuGetErrorName, (CUresult, const char**))                                                             \
  X(CUresult, cuDeviceGetCount, (int*))                                                                             \
  X(CUresult, cuDeviceGet, (CUdevice*, int))                                                                        \
  X(CUresult, cuDeviceGetName, (char*, int, CUdevice))                                                              \
  X(CUresult, cuDeviceGetUuid, (CUuuid*, CUdevice))                                                                 \
  X(CUresult, cuDeviceGetAttribute, (int*, int, CUdevice))                                                          \
  X(CUresult, cuDeviceCanAccessPeer, (int*, CUdevice, CUdevice))                                                    \
  X(CUresult, cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                                                     \
  X(CUresult, cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                             \
  X(CUresult, cuCtxPushCurrent_v2, (CUcontext))                                                                     \
  X(CUresult, cuCtxPopCurrent_v2, (CUcontext*))                                                                     \
  X(CUresult, cuCtxEnablePeerAccess, (CUcontext, unsigned))                                                         \
  X(CUresult, cuStreamCreateWithPriority, (CUstream*, unsigned, int))                                               \
  X(CUresult, cuStreamDestroy_v2, (CUstream))                                                                       \
  X(CUresult, cuStreamSynchronize, (CUstream))                                                                      \
  X(CUresult, cuStreamQuery, (CUstream))                                                                            \
  X(CUresult, cuStreamWriteValue64_v2, (CUstream, CUdeviceptr, uint64_t, unsigned))                                 \
  X(CUresult, cuStreamWaitValue64_v2, (CUstream, CUdeviceptr, uint64_t, unsigned))                                  \
  X(CUresult, cuStreamWaitEvent, (CUstream, CUevent, unsigned))                                                     \
  X(CUresult, cuEventCreate, (CUevent*, unsigned))                                                                  \
  X(CUresult, cuEventDestroy_v2, (CUevent))                                                                         \
  X(CUresult, cuEventRecord, (CUevent, CUstream))                                                                   \
  X(CUresult, cuEventQuery, (CUevent))                                                                              \
  X(CUresult, cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                          \
  X(CUresult, cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                      \
  X(CUresult, cuMemHostRegister_v2, (void*, size_t, unsigned))                                                      \
  X(CUresult, cuMemHostUnregister, (void*))                                                                         \
  X(CUresult, cuMemHostAlloc, (void**, size_t, unsigned))                                                           \
  X(CUresult, cuMemFreeHost, (void*))                                                                               \
  X(CUresult, cuMemGetAddressRange_v2, (CUdeviceptr*, size_t*, CUdeviceptr))                                        \
  X(CUresult, cuPointerGetAttribute, (void*, int, CUdeviceptr))                                                     \
  X(CUresult, cuIpcGetMemHandle, (CUipcMemHandle*, CUdeviceptr))                                                    \
  X(CUresult, cuIpcOpenMemHandle_v2, (CUdeviceptr*, CUipcMemHandle, unsigned))                                      \
  X(CUresult, cuIpcCloseMemHandle, (CUdeviceptr))                                                                   \
  X(CUresult, cuMemGetAllocationGranularity, (size_t*, const CUmemAllocationProp*, int))                            \
  X(CUresult, cuMemCreate, (CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long)) \
  X(CUresult, cuMemRelease, (CUmemGenericAllocationHandle))                                                         \
  X(CUresult, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle*, void*))                                  \
  X(CUresult, cuMemAddressReserve, (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))                 \
  X(CUresult, cuMemAddressFree, (CUdeviceptr, size_t))                                                              \
  X(CUresult, cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))            \
  X(CUresult, cuMemUnmap, (CUdeviceptr, size_t))                                                                    \
  X(CUresult, cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))                                \
  X(CUresult, cuMemExportToShareableHandle, (void*, CUmemGenericAllocationHandle, int, unsigned long long))         \
  X(CUresult, cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle*, void*, int))                          \
  X(CUresult, cuModuleLoadData, (CUmodule*, const void*))                                                           \
  X(CUresult, cuModuleUnload, (CUmodule))                                                                           \
  X(CUresult, cuModuleGetFunction, (CUfunction*, CUmodule, const char*))                                            \
  X(CUresult, cuLaunchKernel,                                                                                       \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**))

struct CUmemcpyAttributes {
  int srcAccessOrder;
  CUmemLocation srcLocHint;
  CUmemLocation dstLocHint;
  unsigned flags;
};
constexpr int kSourceInStreamOrder = 1;

struct Driver {
#define X(result, symbol, parameters) result(*symbol) parameters = nullptr;
  ASYNCFABRIC_CUDA_SYMBOLS(X)
#undef X
  // Of CUDA 13; null with an older driver.
  CUresult (*cuMemcpyBatchAsync_v2)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t,
                                    CUstream) = nullptr;
  // Of CUDA 11.7, and only where the kernel has dma-buf.
  CUresult (*cuMemGetHandleForAddressRange)(void*, CUdeviceptr, size_t, int, unsigned long long) = nullptr;
  // Of CUDA 11.3; null with an older driver.
  CUresult (*cuFlushGPUDirectRDMAWrites)(int target, int scope) = nullptr;
  std::string path;  // the file that was really loaded
  int version = 0;   // 13000 is 13.0
  int devices = 0;

  // "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)"
  std::string complaint(const char* call, CUresult result) const;
};

// Opened once per process and never closed: the driver keeps threads and state of its own. nullptr: `detail` is the reason.
const Driver* open_driver(std::string* detail);

}  // namespace asyncfabric::cuda

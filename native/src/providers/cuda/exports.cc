// exports.cc: what other processes and NICs are given of memory on a GPU. See memory.h.
#include <fcntl.h>
#include <unistd.h>
#include <cerrno>

#include "base/descriptor_room.h"
#include "providers/cuda/memory.h"

namespace asyncfabric::cuda {
namespace {

// The handle of the memory mapped at an address, as a descriptor for other processes.
CUresult export_handle(const Driver& driver, CUdeviceptr at, UniqueFd* out) {
  CUmemGenericAllocationHandle allocation = 0;
  CUresult result = driver.cuMemRetainAllocationHandle(&allocation, reinterpret_cast<void*>(at));
  if (result != kSuccess) return result;
  int fd = -1;
  result = driver.cuMemExportToShareableHandle(&fd, allocation, kPosixDescriptor, 0);
  if (result == kSuccess) *out = UniqueFd(fd);
  driver.cuMemRelease(allocation);
  return result;
}

Status not_shareable(const Driver& driver, CUresult result, std::string* why) {
  *why = driver.complaint("cuMemExportToShareableHandle", result) +
         ": this allocation cannot be shared between processes (a memory pool, or a handle without file descriptors)";
  return {StatusCode::kUnsupported, raw_of(result)};
}

// Memory mapped chunk by chunk, as PyTorch's expandable segments are: a handle for each, all of one length.
Status export_chunks(const Driver& driver, CUdeviceptr end, CUdeviceptr base, size_t chunk, Passport* out,
                     std::vector<UniqueFd>* handles, std::string* why) {
  const uint64_t count = (end - base + chunk - 1) / chunk;
  if (count > kMostChunks) {
    *why = "the range spans " + std::to_string(count) + " allocations of " + std::to_string(chunk) +
           " bytes, more than " + std::to_string(kMostChunks) +
           "; allocate it by fabric.allocate(), or without expandable segments";
    return StatusCode::kUnsupported;
  }
  for (uint64_t number = 0; number < count; ++number) {
    CUdeviceptr begin = 0;
    size_t size = 0;
    CUresult result = driver.cuMemGetAddressRange_v2(&begin, &size, base + number * chunk);
    if (result != kSuccess || begin != base + number * chunk || size != chunk) {
      *why = "the range spans several allocations of different lengths; allocate it by fabric.allocate()";
      return {StatusCode::kUnsupported, raw_of(result)};
    }
    UniqueFd handle;
    result = export_handle(driver, begin, &handle);
    if (result != kSuccess) return not_shareable(driver, result, why);
    make_descriptor_room(handle.get());
    handles->push_back(std::move(handle));
  }
  out->kind = Export::kChunks;
  out->chunk = chunk;
  out->mapped = count * chunk;
  return {};
}

}  // namespace

Status export_memory(const Device& device, const Memory& memory, Passport* out, std::vector<UniqueFd>* handles,
                     std::string* why) {
  const Driver& driver = device.driver();
  const Scope scope(device);
  const auto at = reinterpret_cast<CUdeviceptr>(memory.base);
  int type = 0;
  int ordinal = -1;
  CUresult result = driver.cuPointerGetAttribute(&type, kPointerMemoryType, at);
  if (result == kSuccess) result = driver.cuPointerGetAttribute(&ordinal, kPointerOrdinal, at);
  if (result != kSuccess || type != kMemoryTypeDevice) {
    *why = "the address is no memory of a GPU that this process has allocated (was it freed?)";
    return {StatusCode::kInvalidArgument, raw_of(result)};
  }
  if (ordinal != device.ordinal()) {
    *why = "the memory is on cuda:" + std::to_string(ordinal) +
           ", the rail drives cuda:" + std::to_string(device.ordinal());
    return StatusCode::kUnsupported;
  }
  CUdeviceptr base = 0;
  size_t size = 0;
  result = driver.cuMemGetAddressRange_v2(&base, &size, at);
  if (result != kSuccess) {
    *why = driver.complaint("cuMemGetAddressRange", result);
    return {StatusCode::kInvalidArgument, raw_of(result)};
  }
  out->device = device.uuid();
  out->mapped = size;
  out->offset = at - base;
  if (memory.length > size - out->offset)
    return export_chunks(driver, at + memory.length, base, size, out, handles, why);
  out->kind = Export::kHandle;
  UniqueFd handle;
  if (memory.memfd >= 0) {  // pages of our own
    handle = UniqueFd(fcntl(memory.memfd, F_DUPFD_CLOEXEC, 0));
    if (!handle) return {StatusCode::kNoMemory, errno};
    handles->push_back(std::move(handle));
    return {};
  }
  int legacy = 0;
  if (driver.cuPointerGetAttribute(&legacy, kPointerLegacyIpc, at) == kSuccess && legacy != 0) {
    out->kind = Export::kLegacy;
    result = driver.cuIpcGetMemHandle(&out->legacy, base);
    if (result == kSuccess) return {};
    *why = driver.complaint("cuIpcGetMemHandle", result) + ": the system permits no sharing of GPU memory";
    return {StatusCode::kUnsupported, raw_of(result)};
  }
  result = export_handle(driver, at, &handle);
  if (result != kSuccess) return not_shareable(driver, result, why);
  handles->push_back(std::move(handle));
  return {};
}

Status export_dmabuf(const Device& device, const void* base, uint64_t length, UniqueFd* out, uint64_t* offset) {
  const Driver& driver = device.driver();
  if (driver.cuMemGetHandleForAddressRange == nullptr) return StatusCode::kUnsupported;
  // The driver wants whole pages of the host; an allocation of a GPU begins and ends at larger ones.
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uint64_t>(base) / page * page;
  const uint64_t end = (reinterpret_cast<uint64_t>(base) + length + page - 1) / page * page;
  const Scope scope(device);
  int fd = -1;
  const CUresult result = driver.cuMemGetHandleForAddressRange(&fd, first, end - first, kDmaBufDescriptor, 0);
  if (result != kSuccess) return {StatusCode::kUnsupported, raw_of(result)};
  *out = UniqueFd(fd);
  *offset = reinterpret_cast<uint64_t>(base) - first;
  return {};
}

}  // namespace asyncfabric::cuda

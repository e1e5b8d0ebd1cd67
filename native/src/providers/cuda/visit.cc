// visit.cc: a peer's GPU memory in our address space, mapped for our own device. See memory.h.
#include <cstring>

#include "providers/cuda/memory.h"

namespace asyncfabric::cuda {

Status Visit::open(std::shared_ptr<Device> device, const Passport& passport, uint64_t length,
                   std::span<const UniqueFd> handles, uint64_t own_base, std::unique_ptr<Visit>* out,
                   std::string* why) {
  if (length > passport.mapped - passport.offset) return StatusCode::kInvalidArgument;
  std::unique_ptr<Visit> visit(new Visit(std::move(device)));
  Status status;
  const Scope scope(*visit->device_);
  if (!handles.empty()) {
    status = visit->import(passport, handles, why);
  } else if (own_base != 0) {
    visit->base_ = own_base;
    status = visit->see_neighbour(passport.device, why);
  } else {
    status = visit->open_legacy(passport, length, why);
  }
  if (status.ok()) *out = std::move(visit);
  return status;
}

// One stretch of addresses for all of them, so that a copy sees no borders.
Status Visit::import(const Passport& passport, std::span<const UniqueFd> handles, std::string* why) {
  const Driver& driver = device_->driver();
  const uint64_t each = passport.mapped / handles.size();
  const char* call = "cuMemAddressReserve";
  CUresult result = driver.cuMemAddressReserve(&reserved_, passport.mapped, 0, 0, 0);
  if (result == kSuccess) reserved_bytes_ = passport.mapped;
  for (const UniqueFd& handle : handles) {
    if (result != kSuccess) break;
    CUmemGenericAllocationHandle memory = 0;
    call = "cuMemImportFromShareableHandle";
    result = driver.cuMemImportFromShareableHandle(
        &memory, reinterpret_cast<void*>(static_cast<intptr_t>(handle.get())), kPosixDescriptor);
    if (result != kSuccess) {
      *why = driver.complaint(call, result) + ": the peer's memory handle cannot be opened here";
      return {StatusCode::kUnsupported, raw_of(result)};
    }
    call = "cuMemMap";
    result = driver.cuMemMap(reserved_ + mapped_bytes_, each, 0, memory, 0);
    if (result == kSuccess) mapped_bytes_ += each;
    driver.cuMemRelease(memory);
  }
  if (result == kSuccess) {
    call = "cuMemSetAccess";
    const CUmemAccessDesc access{{kLocationDevice, device_->handle()}, kAccessReadWrite};
    result = driver.cuMemSetAccess(reserved_, passport.mapped, &access, 1);
  }
  if (result != kSuccess) {
    *why = driver.complaint(call, result) + ": cuda:" + std::to_string(device_->ordinal()) +
           " has no access to the peer's GPU (nvidia-smi topo -p2p w)";
    return {StatusCode::kUnsupported, raw_of(result)};
  }
  base_ = reserved_ + passport.offset;
  return {};
}

Status Visit::open_legacy(const Passport& passport, uint64_t length, std::string* why) {
  const Driver& driver = device_->driver();
  CUresult result = driver.cuIpcOpenMemHandle_v2(&legacy_, passport.legacy, kIpcLazyPeerAccess);
  if (result != kSuccess) {
    legacy_ = 0;
    *why = driver.complaint("cuIpcOpenMemHandle", result) + ": cuda:" + std::to_string(device_->ordinal()) +
           " cannot open the peer's memory (nvidia-smi topo -p2p w)";
    return {StatusCode::kUnsupported, raw_of(result)};
  }
  // The peer's word for the size is only a word.
  CUdeviceptr base = 0;
  size_t size = 0;
  result = driver.cuMemGetAddressRange_v2(&base, &size, legacy_);
  if (result != kSuccess || base != legacy_ || passport.offset > size || length > size - passport.offset) {
    *why = "the key claims more than the peer's allocation has";
    return {StatusCode::kInvalidArgument, raw_of(result)};
  }
  base_ = legacy_ + passport.offset;
  return {};
}

// Memory of another rail of this process: plain pointers, if the devices can see each other.
Status Visit::see_neighbour(const CUuuid& uuid, std::string* why) {
  if (std::memcmp(uuid.bytes, device_->uuid().bytes, sizeof uuid.bytes) == 0) return {};
  const Driver& driver = device_->driver();
  for (int ordinal = 0; ordinal < driver.devices; ++ordinal) {
    CUdevice other = 0;
    CUuuid found{};
    if (driver.cuDeviceGet(&other, ordinal) != kSuccess || driver.cuDeviceGetUuid(&found, other) != kSuccess) continue;
    if (std::memcmp(uuid.bytes, found.bytes, sizeof uuid.bytes) != 0) continue;
    int can = 0;
    driver.cuDeviceCanAccessPeer(&can, device_->handle(), other);
    CUcontext context = nullptr;
    const std::string refusal = "cuda:" + std::to_string(device_->ordinal()) +
                                " has no access to cuda:" + std::to_string(ordinal) + " (nvidia-smi topo -p2p w)";
    if (can == 0) {
      *why = refusal;
      return StatusCode::kUnsupported;
    }
    CUresult result = driver.cuDevicePrimaryCtxRetain(&context, other);
    if (result == kSuccess) {
      result = driver.cuCtxEnablePeerAccess(context, 0);
      driver.cuDevicePrimaryCtxRelease_v2(other);  // its own rail holds it
    }
    if (result == kSuccess || result == kPeerAccessAlreadyEnabled) return {};
    *why = driver.complaint("cuCtxEnablePeerAccess", result) + ": " + refusal;
    return {StatusCode::kUnsupported, raw_of(result)};
  }
  *why = "the peer's GPU is not visible to this process";
  return StatusCode::kUnsupported;
}

Visit::~Visit() {
  const Driver& driver = device_->driver();
  const Scope scope(*device_);
  if (legacy_ != 0) driver.cuIpcCloseMemHandle(legacy_);
  if (mapped_bytes_ != 0) driver.cuMemUnmap(reserved_, mapped_bytes_);
  if (reserved_ != 0) driver.cuMemAddressFree(reserved_, reserved_bytes_);
}

}  // namespace asyncfabric::cuda

// memory.cc: passports, pages of our own, pinned host memory. See memory.h; what is exported is in exports.cc, the visiting side in visit.cc.
#include "providers/cuda/memory.h"

#include <map>
#include <mutex>
#include <utility>

#include "base/bytes.h"

namespace asyncfabric::cuda {
namespace {

constexpr uint32_t kPassportMagic = 0x43474641;  // "AFGC"

CUmemAllocationProp pages_of(const Device& device) {
  CUmemAllocationProp prop{};
  prop.type = kAllocationPinned;
  prop.requestedHandleTypes = kPosixDescriptor;
  prop.location = {kLocationDevice, device.handle()};
  return prop;
}

std::string on(const Device& device) { return " on cuda:" + std::to_string(device.ordinal()); }

}  // namespace

std::string encode_passport(std::string_view local_key, const Passport& passport) {
  ByteWriter out;
  out.put(kPassportMagic);
  out.put_string<uint8_t>(local_key);
  out.put(static_cast<uint8_t>(passport.kind));
  if (passport.kind != Export::kHost) {
    out.put_raw({reinterpret_cast<const char*>(passport.device.bytes), sizeof passport.device.bytes});
    out.put(passport.mapped);
    out.put(passport.offset);
  }
  if (passport.kind == Export::kChunks) out.put(passport.chunk);
  if (passport.kind == Export::kLegacy) out.put_raw({passport.legacy.reserved, sizeof passport.legacy.reserved});
  return std::move(out.text());
}

Status decode_passport(std::string_view bytes, std::string_view* local_key, Passport* out) {
  ByteReader in(bytes);
  const uint32_t magic = in.get<uint32_t>();
  *local_key = in.get_string<uint8_t>();
  const uint8_t kind = in.get<uint8_t>();
  if (!in.ok() || magic != kPassportMagic || kind > static_cast<uint8_t>(Export::kChunks))
    return StatusCode::kInvalidArgument;
  out->kind = static_cast<Export>(kind);
  if (out->kind != Export::kHost) {
    for (unsigned char& byte : out->device.bytes) byte = in.get<uint8_t>();
    out->mapped = in.get<uint64_t>();
    out->offset = in.get<uint64_t>();
    if (out->mapped == 0 || out->mapped > 1ull << 46 || out->offset >= out->mapped) return StatusCode::kInvalidArgument;
  }
  if (out->kind == Export::kChunks) {
    out->chunk = in.get<uint64_t>();
    if (out->chunk == 0 || out->mapped % out->chunk != 0 || out->mapped / out->chunk > kMostChunks)
      return StatusCode::kInvalidArgument;
  }
  if (out->kind == Export::kLegacy)
    for (char& byte : out->legacy.reserved) byte = in.get<char>();
  return in.done() ? Status() : Status(StatusCode::kInvalidArgument);
}

Status GpuPages::allocate(std::shared_ptr<Device> device, uint64_t length, std::unique_ptr<DeviceMemory>* out,
                          std::string* why) {
  const Driver& driver = device->driver();
  const Scope scope(*device);
  const CUmemAllocationProp prop = pages_of(*device);
  size_t grain = 0;
  CUresult result = driver.cuMemGetAllocationGranularity(&grain, &prop, kGranularityRecommended);
  if (result != kSuccess || grain == 0) {
    *why = driver.complaint("cuMemGetAllocationGranularity", result);
    return Device::status(result);
  }
  std::unique_ptr<GpuPages> pages(new GpuPages(device));
  pages->reserved_ = (length + grain - 1) / grain * grain;
  CUmemGenericAllocationHandle memory = 0;
  const char* call = "cuMemCreate";
  result = driver.cuMemCreate(&memory, pages->reserved_, &prop, 0);
  if (result != kSuccess) {
    *why =
        driver.complaint(call, result) + ": no " + std::to_string(pages->reserved_) + " bytes are free" + on(*device);
    return Device::status(result);
  }
  int fd = -1;
  call = "cuMemExportToShareableHandle";
  result = driver.cuMemExportToShareableHandle(&fd, memory, kPosixDescriptor, 0);
  if (result == kSuccess) {
    pages->handle_ = UniqueFd(fd);
    call = "cuMemAddressReserve";
    result = driver.cuMemAddressReserve(&pages->base_, pages->reserved_, grain, 0, 0);
  }
  if (result == kSuccess) {
    call = "cuMemMap";
    result = driver.cuMemMap(pages->base_, pages->reserved_, 0, memory, 0);
    pages->mapped_ = result == kSuccess;
  }
  driver.cuMemRelease(memory);  // the mapping keeps it
  if (result == kSuccess) {
    call = "cuMemSetAccess";
    const CUmemAccessDesc access{{kLocationDevice, device->handle()}, kAccessReadWrite};
    result = driver.cuMemSetAccess(pages->base_, pages->reserved_, &access, 1);
  }
  CUstream stream = nullptr;
  if (result == kSuccess) {
    call = "cuMemsetD8Async";  // on a stream of its own: the user's streams wait for nothing
    result = driver.cuStreamCreateWithPriority(&stream, kStreamNonBlocking, 0);
  }
  if (result == kSuccess) {
    result = driver.cuMemsetD8Async(pages->base_, 0, pages->reserved_, stream);
    if (result == kSuccess) result = driver.cuStreamSynchronize(stream);
    driver.cuStreamDestroy_v2(stream);
  }
  if (result != kSuccess) {
    *why = driver.complaint(call, result) + on(*device);
    return Device::status(result);
  }
  *out = std::move(pages);
  return {};
}

GpuPages::~GpuPages() {
  const Driver& driver = device_->driver();
  const Scope scope(*device_);
  if (mapped_) driver.cuMemUnmap(base_, reserved_);
  if (base_ != 0) driver.cuMemAddressFree(base_, reserved_);
}

namespace {

struct Pins {
  std::mutex mutex;
  std::map<void*, std::weak_ptr<Pinned>> ranges;
};

Pins& pins() {
  static Pins* const instance = new Pins;  // never destroyed: rails may close during static destruction
  return *instance;
}

}  // namespace

std::shared_ptr<Pinned> Pinned::hold(std::shared_ptr<Device> device, void* base, uint64_t length) {
  Pins& known = pins();
  const std::lock_guard lock(known.mutex);
  if (const auto found = known.ranges.find(base); found != known.ranges.end()) {
    if (auto pinned = found->second.lock(); pinned != nullptr)
      return pinned->length_ >= length ? std::move(pinned) : nullptr;
  }
  const Scope scope(*device);
  if (device->driver().cuMemHostRegister_v2(base, length, kHostPortable | kHostDeviceMap) != kSuccess) return nullptr;
  std::shared_ptr<Pinned> pinned(new Pinned(std::move(device), base, length));
  known.ranges[base] = pinned;
  return pinned;
}

Pinned::~Pinned() {
  Pins& known = pins();
  const std::lock_guard lock(known.mutex);
  const Scope scope(*device_);
  device_->driver().cuMemHostUnregister(base_);
  if (const auto found = known.ranges.find(base_); found != known.ranges.end() && found->second.expired())
    known.ranges.erase(found);
}

}  // namespace asyncfabric::cuda

// memory.cc: registration as the provider's mr_mode demands it, and keys that nobody can guess.
#include "providers/libfabric/memory/memory.h"

#include <sys/random.h>

#include "providers/libfabric/device/errors.h"

namespace asyncfabric::libfabric {
namespace {

// Our own keys are capabilities: random, so that a dead key is not the key of a later registration. 2^-64 per pair.
bool random_key(size_t key_bytes, uint64_t* key) {
  if (getrandom(key, sizeof *key, 0) != sizeof *key) return false;
  if (key_bytes < sizeof *key) *key &= (uint64_t{1} << (8 * key_bytes)) - 1;
  return true;
}

uint64_t access_flags(uint32_t access) {
  uint64_t flags = FI_SEND | FI_RECV | FI_WRITE | FI_READ;
  if ((access & kAccessRemoteWrite) != 0) flags |= FI_REMOTE_WRITE;
  if ((access & kAccessRemoteRead) != 0) flags |= FI_REMOTE_READ;
  return flags;
}

// Newer than the 1.17 headers: a dma-buf instead of an address, of libfabric 1.20 on. Written from the documentation of
// fi_mr_regattr and the efa provider's sources; never run: the machines at hand have no GPU beside such a NIC.
constexpr uint64_t kByDmabuf = uint64_t{1} << 40;  // FI_MR_DMABUF

struct Dmabuf {  // fi_mr_dmabuf
  int fd;
  uint64_t offset;
  size_t length;
  void* base;  // of the buffer, not of the memory in it: the memory is addressed from base + offset on
};

// What libfabric reads of a registration: its later versions have fields behind those of the headers, 0 when unused.
struct Attributes {
  fi_mr_attr known{};
  uint64_t later[8]{};
};

}  // namespace

Status register_range(const Device& device, const Memory& memory, MrPtr* mr) {
  if (memory.device != kHostDevice && (device.info().caps & FI_HMEM) == 0) return StatusCode::kUnsupported;
  const iovec range{memory.base, memory.length};
  Attributes whole;
  fi_mr_attr& attributes = whole.known;
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = access_flags(memory.access);
  if (memory.device != kHostDevice) {
    attributes.iface = FI_HMEM_CUDA;
    attributes.device.cuda = memory.device;
  }
  const Dmabuf dmabuf{memory.dmabuf, memory.dmabuf_offset, memory.length,
                      static_cast<uint8_t*>(memory.base) - memory.dmabuf_offset};
  uint64_t flags = 0;
  if (memory.device != kHostDevice && memory.dmabuf >= 0 && device.api() >= kDmabufApi) {
    attributes.mr_iov = reinterpret_cast<const iovec*>(&dmabuf);  // a union there
    flags = kByDmabuf;
  }
  int error = 0;
  fid_mr* opened = nullptr;
  for (int attempt = 0; attempt < 4; ++attempt) {
    if (!device.needs(FI_MR_PROV_KEY) && !random_key(device.info().domain_attr->mr_key_size, &attributes.requested_key))
      return {StatusCode::kInternal, errno};
    error = fi_mr_regattr(device.domain(), &attributes, flags, &opened);
    if (error != 0 && error != -FI_ENOKEY && flags != 0) {  // as verbs: what takes no dma-buf may know the address
      attributes.mr_iov = &range;
      flags = 0;
      error = fi_mr_regattr(device.domain(), &attributes, flags, &opened);
    }
    if (error != -FI_ENOKEY) break;  // the key is in use: draw another
  }
  if (error != 0) return status_of_control(-error);
  MrPtr owned(opened);
  if (device.needs(FI_MR_ENDPOINT)) {
    error = fi_mr_bind(opened, &device.endpoint()->fid, 0);
    if (error == 0) error = fi_mr_enable(opened);
    if (error != 0) return status_of_control(-error);
  }
  *mr = std::move(owned);
  return StatusCode::kOk;
}

Status Registration::create(std::shared_ptr<Device> device, const Memory& memory, std::unique_ptr<Registration>* out,
                            std::string* key) {
  std::unique_ptr<Registration> registration(new Registration(std::move(device), memory));
  if (const Status status = registration->open(key); !status.ok()) return status;
  *out = std::move(registration);
  return StatusCode::kOk;
}

Status Registration::renew(std::string* key) {
  close();
  return open(key);
}

MemoryKey Registration::key_of(const KeyScope& scope, const MrPtr& mr) const {
  MemoryKey parts;
  parts.provider = provider_hash(device_->info().fabric_attr->prov_name);
  parts.access = scope.access;
  parts.length = scope.length;
  parts.first = scope.offset;
  if (mr != nullptr) {
    parts.key = fi_mr_key(mr.get());
    if (device_->needs(FI_MR_VIRT_ADDR)) parts.base = reinterpret_cast<uint64_t>(memory_.base) + scope.offset;
  }
  return parts;
}

Status Registration::open(std::string* key) {
  if (remotely_accessible() || device_->needs(FI_MR_LOCAL)) {
    if (const Status status = register_range(*device_, memory_, &mr_); !status.ok()) return status;
    descriptor_ = fi_mr_desc(mr_.get());
  }
  *key = encode(key_of({memory_.access, 0, memory_.length, false}, mr_));
  return StatusCode::kOk;
}

Status Registration::narrow(const KeyScope& scope, std::string* key) {
  if ((scope.access & ~memory_.access) != 0) return StatusCode::kAccessDenied;
  if (fence != 0) return StatusCode::kBusy;
  const KeyScope own = scope.strict ? scope : KeyScope{scope.access, 0, memory_.length, false};
  if (own.offset > memory_.length || own.length > memory_.length - own.offset || own.length == 0)
    return StatusCode::kOutOfBounds;
  if (own.access == kAccessLocal) {
    *key = encode(key_of(own, MrPtr()));
    return StatusCode::kOk;
  }
  MrPtr& mr = narrower_[own];
  if (mr == nullptr) {
    Memory part = memory_;
    part.base = static_cast<uint8_t*>(memory_.base) + own.offset;
    part.length = own.length;
    part.access = own.access;
    part.dmabuf_offset += own.offset;
    if (const Status status = register_range(*device_, part, &mr); !status.ok()) {
      narrower_.erase(own);
      return status;
    }
  }
  *key = encode(key_of(own, mr));
  return StatusCode::kOk;
}

}  // namespace asyncfabric::libfabric

// memory.cc: see memory.h.
#include "providers/verbs/memory/memory.h"

#include <cerrno>

#include "providers/verbs/device/errors.h"
#include "providers/verbs/peers/queue_pair.h"

namespace asyncfabric::verbs {
namespace {

int remote_rights(uint32_t access) {
  int rights = 0;
  if ((access & kAccessRemoteWrite) != 0) rights |= IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE;
  if ((access & kAccessRemoteRead) != 0) rights |= IBV_ACCESS_REMOTE_READ;
  return rights;
}

// dereg_mr refuses only while something still uses the registration; then the memory must stay.
Status drop(Owned<ibv_mr>& mr) {
  if (!mr) return {};
  const auto close = mr.get_deleter().close;
  ibv_mr* gone = mr.release();
  const int error = close(gone);
  if (error == 0) return {};
  mr.reset(gone);
  return {StatusCode::kDrainTimeout, error};
}

KeyScope widest(const Memory& memory) { return {memory.access, 0, memory.length, false}; }

}  // namespace

Registration::~Registration() { registry_->forget(*this); }

Status Registry::add(const Memory& memory, std::unique_ptr<Registration>* out, std::string* key) {
  auto made = std::make_unique<Registration>(shared_from_this(), memory);
  {
    const std::lock_guard lock(mutex_);
    if (life_ != 0)
      if (const Status status = open_local(*made); !status.ok()) return status;
    if (const Status status = expose(*made, widest(memory), key); !status.ok()) return status;
    all_.insert(made.get());
  }
  *out = std::move(made);
  return {};
}

Status Registry::expose(Registration& registration, const KeyScope& scope, std::string* key) {
  if (const auto found = registration.exposed_.find(scope); found != registration.exposed_.end()) {
    *key = key_of(registration, found->second);
    return {};
  }
  Exposed made{scope, random_word(), {}};
  if (life_ != 0)
    if (const Status status = open_remote(registration.memory_, scope, &made.mr); !status.ok()) return status;
  const Exposed& kept = registration.exposed_.emplace(scope, std::move(made)).first->second;
  by_id_[kept.id] = &kept;
  *key = key_of(registration, kept);
  return {};
}

Status Registry::narrow(Registration& registration, const KeyScope& scope, std::string* key) {
  const Memory& memory = registration.memory_;
  if ((scope.access & ~memory.access) != 0) return StatusCode::kAccessDenied;
  if (scope.offset > memory.length || scope.length > memory.length - scope.offset || scope.length == 0)
    return StatusCode::kOutOfBounds;
  const std::lock_guard lock(mutex_);
  if (registration.exposed_.empty()) return StatusCode::kBusy;  // being revoked, and what uses it is still there
  return expose(registration, scope.strict ? scope : KeyScope{scope.access, 0, memory.length, false}, key);
}

// All but those that the device still uses, whose keys are dead to our engine all the same.
Status Registry::cover(Registration& registration) {
  Status worst;
  for (auto entry = registration.exposed_.begin(); entry != registration.exposed_.end();) {
    by_id_.erase(entry->second.id);
    if (const Status status = drop(entry->second.mr); status.ok()) {
      entry = registration.exposed_.erase(entry);
    } else {
      worst = status;
      ++entry;
    }
  }
  return worst;
}

// The new one first, so that it cannot get the number of an old one.
Status Registry::renew(Registration& registration, std::string* key) {
  const std::lock_guard lock(mutex_);
  Exposed fresh{widest(registration.memory_), random_word(), {}};
  if (life_ != 0)
    if (const Status status = open_remote(registration.memory_, fresh.scope, &fresh.mr); !status.ok()) return status;
  if (const Status status = cover(registration); !status.ok()) return status;
  const Exposed& kept = registration.exposed_.emplace(fresh.scope, std::move(fresh)).first->second;
  by_id_[kept.id] = &kept;
  *key = key_of(registration, kept);
  return {};
}

Status Registry::close(Registration& registration) {
  const std::lock_guard lock(mutex_);
  if (const Status status = cover(registration); !status.ok()) return status;
  return drop(registration.local_);
}

void Registry::forget(Registration& registration) {
  const std::lock_guard lock(mutex_);
  all_.erase(&registration);
  for (const auto& [scope, exposed] : registration.exposed_) by_id_.erase(exposed.id);
}

// What does not go now goes with the device's file, which the kernel closes.
void Registry::close_all() {
  const std::lock_guard lock(mutex_);
  life_ = 0;
  for (Registration* registration : all_) {
    for (auto& [scope, exposed] : registration->exposed_) exposed.mr.reset();
    registration->local_.reset();
  }
}

Status Registry::open_all(uint32_t life) {
  const std::lock_guard lock(mutex_);
  for (Registration* registration : all_) {
    Status status = open_local(*registration);
    for (auto& [scope, exposed] : registration->exposed_)
      if (status.ok()) status = open_remote(registration->memory_, scope, &exposed.mr);
    if (!status.ok()) return status;
  }
  life_ = life;
  return {};
}

bool Registry::find(uint64_t id, uint32_t* rkey) const {
  const std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  if (found == by_id_.end() || !found->second->mr) return false;
  *rkey = found->second->mr->rkey;
  return true;
}

Status Registry::add_range(const Memory& memory, int access, Owned<ibv_mr>* out) const {
  const Library& library = device_->library();
  const auto base = reinterpret_cast<uint64_t>(memory.base);
  // Optional: the kernel drops it where the device cannot. Without it a PCIe bridge keeps all writes in line and ConnectX-7 stays
  // below line rate; the order of immediates behind their data does not depend on it.
  const int flags = access | (device_->options().relaxed_ordering ? IBV_ACCESS_RELAXED_ORDERING : 0);
  ibv_mr* mr = nullptr;
  // GPU memory: by its dma-buf when there is one, else the nvidia-peermem module must know the address. Never run so far: the
  // machines at hand have no GPU beside an RDMA device.
  if (memory.device != kHostDevice && memory.dmabuf >= 0)
    mr = library.ibv_reg_dmabuf_mr(device_->pd(), memory.dmabuf_offset, memory.length, base, memory.dmabuf, flags);
  if (mr == nullptr)
    mr = library.ibv_reg_mr_iova2(device_->pd(), memory.base, memory.length, base, static_cast<unsigned>(flags));
  if (mr == nullptr && flags != access)
    mr = library.ibv_reg_mr_iova2(device_->pd(), memory.base, memory.length, base, static_cast<unsigned>(access));
  if (mr == nullptr) return {StatusCode::kNoMemory, errno};
  *out = own(mr, library.ibv_dereg_mr);
  return {};
}

Status Registry::open_local(Registration& registration) const {
  return add_range(registration.memory_, IBV_ACCESS_LOCAL_WRITE, &registration.local_);
}

Status Registry::open_remote(const Memory& memory, const KeyScope& scope, Owned<ibv_mr>* out) const {
  if (scope.access == kAccessLocal) return {};
  Memory part = memory;
  part.base = static_cast<uint8_t*>(memory.base) + scope.offset;
  part.length = scope.length;
  part.dmabuf_offset += scope.offset;
  return add_range(part, remote_rights(scope.access), out);
}

std::string Registry::key_of(const Registration& registration, const Exposed& exposed) const {
  MemoryKey parts;
  parts.incarnation = incarnation_;
  parts.base = reinterpret_cast<uint64_t>(registration.memory_.base);  // offsets of requests count from there
  parts.length = exposed.scope.offset + exposed.scope.length;
  parts.access = exposed.scope.access;
  parts.id = exposed.id;
  parts.life = life_;
  if (exposed.mr) parts.rkey = exposed.mr->rkey;
  return encode(parts);
}

}  // namespace asyncfabric::verbs

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

// dereg_mr says no only while something still uses the registration; then the memory must stay.
Status drop(Owned<ibv_mr>& mr) {
  if (!mr) return {};
  const auto close = mr.get_deleter().close;
  ibv_mr* gone = mr.release();
  const int error = close(gone);
  if (error == 0) return {};
  mr.reset(gone);
  return {StatusCode::kDrainTimeout, error};
}

}  // namespace

Registration::~Registration() { registry_->forget(*this); }

Status Registry::add(const Memory& memory, std::unique_ptr<Registration>* out, std::string* key) {
  auto made = std::make_unique<Registration>(shared_from_this(), memory);
  const std::lock_guard lock(mutex_);
  if (life_ != 0)
    if (const Status status = open_local(*made); !status.ok()) return status;
  if (life_ != 0)
    if (const Status status = open_remote(memory, &made->remote_); !status.ok()) return status;
  made->id_ = random_word();
  all_[made->id_] = made.get();
  *key = key_of(*made);
  *out = std::move(made);
  return {};
}

// The new one first, so that it cannot get the number of the old one.
Status Registry::renew(Registration& registration, std::string* key) {
  const std::lock_guard lock(mutex_);
  Owned<ibv_mr> fresh;
  if (life_ != 0)
    if (const Status status = open_remote(registration.memory_, &fresh); !status.ok()) return status;
  if (const Status status = drop(registration.remote_); !status.ok()) return status;
  registration.remote_ = std::move(fresh);
  all_.erase(registration.id_);
  registration.id_ = random_word();
  all_[registration.id_] = &registration;
  *key = key_of(registration);
  return {};
}

Status Registry::close(Registration& registration) {
  const std::lock_guard lock(mutex_);
  if (const Status status = drop(registration.remote_); !status.ok()) return status;
  return drop(registration.local_);
}

void Registry::forget(Registration& registration) {
  const std::lock_guard lock(mutex_);
  const auto found = all_.find(registration.id_);
  if (found != all_.end() && found->second == &registration) all_.erase(found);
}

// What does not go now goes with the device's file, which the kernel closes.
void Registry::close_all() {
  const std::lock_guard lock(mutex_);
  life_ = 0;
  for (const auto& [id, registration] : all_) {
    registration->remote_.reset();
    registration->local_.reset();
  }
}

Status Registry::open_all(uint32_t life) {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, registration] : all_) {
    Status status = open_local(*registration);
    if (status.ok()) status = open_remote(registration->memory_, &registration->remote_);
    if (!status.ok()) return status;
  }
  life_ = life;
  return {};
}

bool Registry::find(uint64_t id, uint32_t* rkey) const {
  const std::lock_guard lock(mutex_);
  const auto found = all_.find(id);
  if (found == all_.end() || !found->second->remote_) return false;
  *rkey = found->second->remote_->rkey;
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

Status Registry::open_remote(const Memory& memory, Owned<ibv_mr>* out) const {
  if (memory.access == kAccessLocal) return {};
  return add_range(memory, remote_rights(memory.access), out);
}

std::string Registry::key_of(const Registration& registration) const {
  MemoryKey parts;
  parts.incarnation = incarnation_;
  parts.base = reinterpret_cast<uint64_t>(registration.memory_.base);
  parts.length = registration.memory_.length;
  parts.access = registration.memory_.access;
  parts.id = registration.id_;
  parts.life = life_;
  if (registration.remote_) parts.rkey = registration.remote_->rkey;
  return encode(parts);
}

}  // namespace asyncfabric::verbs

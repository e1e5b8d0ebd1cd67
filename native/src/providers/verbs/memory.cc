// memory.cc: see memory.h.
#include "providers/verbs/memory.h"

#include <cerrno>

#include "providers/verbs/errors.h"

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

Status Registration::create(std::shared_ptr<const Device> device, uint64_t incarnation, const Memory& memory,
                            std::unique_ptr<Registration>* out, std::string* key) {
  std::unique_ptr<Registration> registration(new Registration(std::move(device), incarnation, memory));
  if (const Status status = registration->add(IBV_ACCESS_LOCAL_WRITE, &registration->local_); !status.ok())
    return status;
  if (const Status status = registration->open_remote(&registration->remote_, key); !status.ok()) return status;
  *out = std::move(registration);
  return {};
}

Status Registration::add(int access, Owned<ibv_mr>* out) const {
  const Library& library = device_->library();
  const auto base = reinterpret_cast<uint64_t>(memory_.base);
  // Optional: the kernel drops it where the device cannot. Without it a PCIe bridge keeps all writes in line and ConnectX-7 stays
  // below line rate; the order of immediates behind their data does not depend on it.
  const int flags = access | (device_->options().relaxed_ordering ? IBV_ACCESS_RELAXED_ORDERING : 0);
  ibv_mr* mr = nullptr;
  // GPU memory: by its dma-buf when there is one, else the nvidia-peermem module must know the address. Never run so far: the
  // machines at hand have no GPU beside an RDMA device.
  if (memory_.device != kHostDevice && memory_.dmabuf >= 0)
    mr = library.ibv_reg_dmabuf_mr(device_->pd(), memory_.dmabuf_offset, memory_.length, base, memory_.dmabuf, flags);
  if (mr == nullptr)
    mr = library.ibv_reg_mr_iova2(device_->pd(), memory_.base, memory_.length, base, static_cast<unsigned>(flags));
  if (mr == nullptr && flags != access)
    mr = library.ibv_reg_mr_iova2(device_->pd(), memory_.base, memory_.length, base, static_cast<unsigned>(access));
  if (mr == nullptr) return {StatusCode::kNoMemory, errno};
  *out = own(mr, library.ibv_dereg_mr);
  return {};
}

Status Registration::open_remote(Owned<ibv_mr>* out, std::string* key) const {
  MemoryKey parts;
  parts.incarnation = incarnation_;
  parts.base = reinterpret_cast<uint64_t>(memory_.base);
  parts.length = memory_.length;
  parts.access = memory_.access;
  if (memory_.access != kAccessLocal) {
    if (const Status status = add(remote_rights(memory_.access), out); !status.ok()) return status;
    parts.rkey = (*out)->rkey;
  }
  *key = encode(parts);
  return {};
}

// The new one first, so that it cannot get the number of the old one.
Status Registration::renew(std::string* key) {
  Owned<ibv_mr> fresh;
  if (const Status status = open_remote(&fresh, key); !status.ok()) return status;
  if (const Status status = drop(remote_); !status.ok()) return status;
  remote_ = std::move(fresh);
  return {};
}

Status Registration::close() {
  if (const Status status = drop(remote_); !status.ok()) return status;
  return drop(local_);
}

}  // namespace asyncfabric::verbs

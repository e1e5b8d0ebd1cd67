// rail_control.cc: the control calls of a cuda rail: memory, connections, what streams of the user wait for. See rail.h.
#include <unistd.h>

#include "base/clock.h"
#include "base/descriptor_room.h"
#include "providers/cuda/rail.h"

namespace asyncfabric::cuda {
namespace {

class Mark final : public StreamMark {
 public:
  Mark(std::shared_ptr<Device> device, CUevent event) : device_(std::move(device)), event_(event) {}
  ~Mark() override { device_->driver().cuEventDestroy_v2(event_); }
  Status passed() override {
    const CUresult result = device_->driver().cuEventQuery(event_);
    return result == kNotReady ? Status(StatusCode::kBusy) : Device::status(result);
  }

 private:
  std::shared_ptr<Device> device_;
  CUevent event_;
};

}  // namespace

Status CudaRail::allocate_memory(uint64_t length, int32_t device, std::unique_ptr<DeviceMemory>* out) {
  why_.clear();
  if (device != device_->ordinal()) return StatusCode::kUnsupported;
  return GpuPages::allocate(device_, length, out, &why_);
}

Status CudaRail::export_dmabuf(const void* base, uint64_t length, UniqueFd* out, uint64_t* offset) {
  return cuda::export_dmabuf(*device_, base, length, out, offset);
}

Status CudaRail::share_words(void* base, uint64_t length) {
  auto words = Pinned::hold(device_, base, length);
  if (words == nullptr) return StatusCode::kNoMemory;
  words_.push_back(std::move(words));
  return {};
}

Status CudaRail::stream_wait(void* stream, const uint64_t* word, uint64_t value) {
  if (words_.empty()) return StatusCode::kUnsupported;
  const Scope scope(*device_);
  return Device::status(device_->driver().cuStreamWaitValue64_v2(
      static_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(word), value, kWaitGreaterOrEqual));
}

Status CudaRail::mark_stream(void* stream, std::unique_ptr<StreamMark>* out) {
  const Scope scope(*device_);
  CUevent event = nullptr;
  CUresult result = device_->driver().cuEventCreate(&event, kEventDisableTiming);
  if (result == kSuccess) {
    *out = std::make_unique<Mark>(device_, event);
    result = device_->driver().cuEventRecord(event, static_cast<CUstream>(stream));
  }
  return Device::status(result);
}

Status CudaRail::register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) {
  why_.clear();
  auto made = std::make_unique<CudaMemory>();
  made->base = reinterpret_cast<uint64_t>(memory.base);
  made->on_gpu = memory.device != kHostDevice;
  std::vector<UniqueFd> handles;
  if (made->on_gpu) {
    if (const Status status = export_memory(*device_, memory, &made->passport, &handles, &why_); !status.ok())
      return status;
  } else {
    made->pinned = Pinned::hold(device_, memory.base, memory.length);
  }
  std::string entry_key;
  const Status status = enter(memory, std::move(handles), &made->entry, &entry_key);
  if (!status.ok()) return status;
  *key = encode_passport(entry_key, made->passport);
  *out = std::move(made);
  return {};
}

Status CudaRail::narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) {
  auto& held = static_cast<CudaMemory&>(memory);
  std::string entry_key;
  const Status status = LocalRail::narrow_key(*held.entry, scope, &entry_key);
  if (status.ok()) *key = encode_passport(entry_key, held.passport);
  return status;
}

Status CudaRail::revoke_memory(LocalMemory& memory, uint64_t patience_ns, std::string* new_key) {
  auto& held = static_cast<CudaMemory&>(memory);
  std::string entry_key;
  const Status status = LocalRail::revoke_memory(*held.entry, patience_ns, &entry_key);
  if (status.ok()) *new_key = encode_passport(entry_key, held.passport);
  return status;
}

Status CudaRail::release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t patience_ns) {
  auto& held = static_cast<CudaMemory&>(*memory);
  const Status status = LocalRail::release_memory(held.entry, patience_ns);
  if (!status.ok()) return status;
  queue_->drain();  // our own copies; none is left when the engine closes in order
  memory.reset();
  return {};
}

Status CudaRail::connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) {
  const Status status = LocalRail::connect(address, patience_ns, out);
  if (status.ok()) { static_cast<local::PeerHandle&>(**out).link->companion = std::make_unique<Flights>(); }
  return status;
}

Status CudaRail::attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                        std::unique_ptr<RemoteMemory>* out) {
  why_.clear();
  if (*out == nullptr || !static_cast<CudaRemote&>(**out).begun()) *out = std::make_unique<CudaRemote>();
  auto& remote = static_cast<CudaRemote&>(**out);
  const Status status = reach(peer, key, from_now(patience_ns), remote);
  if (status.code == StatusCode::kBusy) return status;
  remote.files.clear();
  if (!status.ok()) out->reset();
  return status;
}

Status CudaRail::reach(RailPeer& peer, std::string_view key, uint64_t deadline_ns, CudaRemote& remote) {
  std::string_view entry_key;
  Passport passport;
  if (const Status status = decode_passport(key, &entry_key, &passport); !status.ok()) return status;
  if (const Status status = look_up(peer, entry_key, deadline_ns, remote); !status.ok()) return status;
  local::Outgoing& link = *remote.link;
  const bool own_process = link.process->pid() == getpid();
  remote.on_gpu = (remote.access & local::kTraitDevice) != 0;
  if (remote.on_gpu != (passport.kind != Export::kHost)) return StatusCode::kInvalidArgument;
  if (!remote.on_gpu) {
    if (const Status status = LocalRail::reach(remote, remote.files.front()); !status.ok()) return status;
    // Memory that the peer's engine did not allocate is not mapped here; between hosts' memories the kernel copies it.
    if (remote.direct != nullptr) {
      remote.copy_base = reinterpret_cast<uint64_t>(remote.direct);
      if (!own_process) remote.pinned = Pinned::hold(device_, remote.direct, remote.length);
    }
  } else if ((remote.visit = visits_.find(remote)) == nullptr) {
    const uint64_t wanted = passport.handles();
    while (remote.files.size() < wanted) {
      local::WireMessage answer;
      if (const Status status = ask(link, {remote.slot, remote.word}, deadline_ns, remote, &answer); !status.ok())
        return status;
    }
    const auto handles = std::span<const UniqueFd>(remote.files).first(wanted);
    for (const UniqueFd& handle : handles) {
      if (!handle) return StatusCode::kPeerRejected;
      make_descriptor_room(handle.get());
    }
    std::unique_ptr<Visit> visit;
    const Status status =
        Visit::open(device_, passport, remote.length, handles, own_process ? remote.base : 0, &visit, &why_);
    if (!status.ok()) return status;
    remote.visit = std::move(visit);
    if (!own_process) visits_.keep(remote, remote.visit);
  }
  if (remote.visit != nullptr) remote.copy_base = remote.visit->base();
  return {};
}

}  // namespace asyncfabric::cuda

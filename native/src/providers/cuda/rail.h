// rail.h: CudaRail: one GPU. Connections, notices, messages and host memory are those of the local rail that it is built on; it
// adds memory of GPUs and the copies that touch it. rail.cc: opening and the lock holder's calls; rail_control.cc: the control calls.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "provider/gpu_rail.h"
#include "providers/cuda/copy_queue.h"
#include "providers/cuda/flights.h"
#include "providers/cuda/memory.h"
#include "providers/cuda/visits.h"
#include "providers/local/rail.h"

namespace asyncfabric::cuda {

struct Options {
  int device = 0;
  ListMode lists = ListMode::kKernel;  // lists=kernel|batch|single: how lists of small copies are made
  uint32_t lanes = 1;                  // lanes=1..4: streams that launches go to in turn
  local::Options local;
};

Status parse_options(const RailSpec& spec, Options* out, std::string* detail);

class CudaMemory final : public LocalMemory {
 public:
  std::unique_ptr<LocalMemory> entry;  // of the local rail
  std::shared_ptr<Pinned> pinned;      // host memory
  Passport passport;
  uint64_t base = 0;
  bool on_gpu = false;
};

class CudaRemote final : public local::RemoteHandle {
 public:
  std::shared_ptr<Visit> visit;    // memory of a GPU
  std::shared_ptr<Pinned> pinned;  // host memory of another process
  uint64_t copy_base = 0;          // where our copy engines reach it; 0: not at all
  bool on_gpu = false;
};

class CudaRail final : public local::LocalRail, public GpuRail {
 public:
  static Status open(const Options& options, std::unique_ptr<Rail>* out, std::string* detail);
  ~CudaRail() override;

  const Capabilities& capabilities() const override { return cuda_capabilities_; }
  RailInfo info() const override;

  GpuRail* gpu() override { return this; }
  std::string why() const override { return why_; }
  Status allocate_memory(uint64_t length, int32_t device, std::unique_ptr<DeviceMemory>* out) override;
  Status export_dmabuf(const void* base, uint64_t length, UniqueFd* out, uint64_t* offset) override;
  Status share_words(void* base, uint64_t length) override;
  Status stream_wait(void* stream, const uint64_t* word, uint64_t value) override;
  Status mark_stream(void* stream, std::unique_ptr<StreamMark>* out) override;
  Status flush_nic_writes() override { return device_->flush_nic_writes(); }
  Status register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) override;
  Status narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) override;
  Status revoke_memory(LocalMemory& memory, uint64_t patience_ns, std::string* new_key) override;
  Status release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t patience_ns) override;
  Status connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) override;
  Status attach(RailPeer& peer, std::string_view key, uint64_t patience_ns,
                std::unique_ptr<RemoteMemory>* out) override;
  Status disconnect(RailPeer& peer) override;

  PostResult post(std::span<const WorkRequest> requests) override;
  size_t poll(std::span<RailEvent> events) override;
  bool prepare_wait() override;

 private:
  CudaRail(const Options& options, std::unique_ptr<Rooms> rooms, std::shared_ptr<Device> device,
           std::unique_ptr<CopyQueue> queue);

  Status reach(RailPeer& peer, std::string_view key, uint64_t deadline_ns, CudaRemote& remote);
  size_t post_local(std::span<const WorkRequest> rest, Status* status);
  bool take_off(const WorkRequest& request);  // false: no room now
  void settle();
  void look_for_leavers();
  bool land(local::Outgoing& link, Flights& flights);

  std::shared_ptr<Device> device_;
  std::unique_ptr<CopyQueue> queue_;
  Capabilities cuda_capabilities_;
  std::vector<std::shared_ptr<local::Outgoing>> flying_;  // connections with flights
  local::DoneQueue done_;
  std::vector<std::shared_ptr<Pinned>> words_;
  Visits visits_;
  uint64_t looked_ns_ = 0;
  std::string why_;  // [control]
  bool down_ = false;
  bool reported_down_ = false;
};

}  // namespace asyncfabric::cuda

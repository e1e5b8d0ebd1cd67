// loopback_gpu.h: the part of a loopback rail that stands for a GPU which does not order what NICs write: it takes words and flushes, and
// has no memory, dma-bufs or streams.
#pragma once

#include <functional>
#include <memory>

#include "provider/gpu_rail.h"

namespace asyncfabric {

class LoopbackGpu : public GpuRail {
 public:
  std::function<Status()> flushing;  // runs at each flush and returns its answer

  Status flush_nic_writes() override { return flushing ? flushing() : Status(); }
  Status share_words(void*, uint64_t) override { return {}; }
  Status allocate_memory(uint64_t, int32_t, std::unique_ptr<DeviceMemory>*) override {
    return StatusCode::kUnsupported;
  }
  Status export_dmabuf(const void*, uint64_t, UniqueFd*, uint64_t*) override { return StatusCode::kUnsupported; }
  Status stream_wait(void*, const uint64_t*, uint64_t) override { return StatusCode::kUnsupported; }
  Status mark_stream(void*, std::unique_ptr<StreamMark>*) override { return StatusCode::kUnsupported; }

 protected:
  ~LoopbackGpu() = default;
};

}  // namespace asyncfabric

// gpu_rail.h: what the rail of a GPU can do besides moving bytes: memory of its own, dma-bufs for NICs, and words of the host that kernels
// and streams wait for or store to. Rail::gpu() has it. Threads: see each method.
#pragma once

#include <cstdint>
#include <memory>

#include "asyncfabric/types.h"
#include "base/unique_fd.h"

namespace asyncfabric {

// Memory of a GPU that a rail allocated for the engine; freed when destroyed, after each rail released it.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual void* base() const = 0;
  virtual int handle_fd() const = 0;  // what Memory.memfd is for such memory: the allocation's shareable handle
};

// A point in a stream of the user, or a value of a word.
class StreamMark {
 public:
  virtual ~StreamMark() = default;
  virtual Status passed() = 0;  // [engine lock] kBusy: not yet
};

class GpuRail {
 public:
  // [control] Memory of GPU `device`, which must be this rail's.
  virtual Status allocate_memory(uint64_t length, int32_t device, std::unique_ptr<DeviceMemory>* out) = 0;
  // [control] A dma-buf of memory of this GPU, which the rails of NICs are shown; it is open as long as the region is.
  virtual Status export_dmabuf(const void* base, uint64_t length, UniqueFd* out, uint64_t* offset) = 0;
  // Lets kernels reach words of the host at their own address until the rail closes. Called before the worker runs, for words that they
  // wait for or store to, and for the room that lists of pages lie in.
  virtual Status share_words(void* base, uint64_t length) = 0;
  // Any thread: makes a stream of the user wait until the shared word is at least `value`.
  virtual Status stream_wait(void* stream, const uint64_t* word, uint64_t value) = 0;
  // Any thread: what NICs wrote to memory of this GPU, before their immediates were polled, is visible to its kernels on return.
  virtual Status flush_nic_writes() = 0;
  // Any thread: what a stream was given so far, to be asked about under the engine lock.
  virtual Status mark_stream(void* stream, std::unique_ptr<StreamMark>* out) = 0;

 protected:
  ~GpuRail() = default;  // ends with the Rail that it is part of
};

}  // namespace asyncfabric

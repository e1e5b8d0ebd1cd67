// memory.h: memory to register, and the opaque handles of what a rail registered, attached or connected; each rail derives its own. The
// engine holds them and destroys them; a handle may outlive its rail.
#pragma once

#include <cstdint>

#include "asyncfabric/types.h"

namespace asyncfabric {

// `memfd` >= 0 when the engine allocated the pages itself: base is a MAP_SHARED mapping of memfd at 0.
struct Memory {
  void* base = nullptr;
  uint64_t length = 0;
  int32_t device = kHostDevice;
  int memfd = -1;
  uint32_t access = 0;
  int dmabuf = -1;  // of memory of a GPU, for NICs: a dma-buf that holds the range from dmabuf_offset on
  uint64_t dmabuf_offset = 0;
};

class LocalMemory {
 public:
  virtual ~LocalMemory() = default;
};
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;
};
class RailPeer {
 public:
  virtual ~RailPeer() = default;
};

}  // namespace asyncfabric

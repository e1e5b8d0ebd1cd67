// memory.h: memory to register, and the opaque handles of what a rail registered, attached or connected; each rail derives its own. The
// engine holds them and destroys them; a handle may outlive its rail.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>

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

// What a key lets its holder do: rights out of the registration's. Of a strict one, within [offset, offset + length) of the registered
// memory; otherwise the range is the engine's business and is not looked at.
struct KeyScope {
  uint32_t access = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  bool strict = false;
  auto operator<=>(const KeyScope&) const = default;
};

class LocalMemory {
 public:
  virtual ~LocalMemory() = default;
  // [control] Before its keys end. False: none of them ever left this process, so that nobody has to be asked whether he writes there.
  bool handed_out = true;
};
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;
  // Where this process has those bytes mapped and may store to them, for as long as the pointer is held; null: nowhere. Who stores there is
  // not bound by the key: neither revoking nor releasing the memory waits for him.
  virtual std::shared_ptr<uint8_t> mapped(uint64_t, uint64_t) const { return nullptr; }  // offset, length
};
class RailPeer {
 public:
  virtual ~RailPeer() = default;
  // [engine lock] It is gone. Its kPeerLost may have come before the engine had the handle.
  virtual bool lost() const { return false; }
};

}  // namespace asyncfabric

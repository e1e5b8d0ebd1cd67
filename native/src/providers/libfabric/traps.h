// traps.h: what stands where a dead key was. The shm provider of libfabric 1.17 never answers a write whose key is refused: the
// writer's queue would stand still for ever, for a key that was merely revoked a moment ago. So a dead key is registered again over
// memory that nobody reads, and the immediates of such writes, which carry a part of the key, are dropped.
// Control calls change it, poll() asks it; they never overlap.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_set>
#include <vector>

#include "providers/libfabric/fids.h"

namespace asyncfabric::libfabric {

// The upper half of the 64 bits that travel with a write.
constexpr uint32_t key_tag(uint64_t key) { return static_cast<uint32_t>(key); }

class Traps {
 public:
  explicit Traps(fid_domain* domain) : domain_(domain) {}
  ~Traps();
  Traps(const Traps&) = delete;
  Traps& operator=(const Traps&) = delete;

  void set(uint64_t key, uint64_t length);
  bool empty() const { return tags_.empty(); }
  bool holds(uint32_t tag) const { return tags_.contains(tag); }

 private:
  struct Trap {
    MrPtr mr;
    uint32_t tag = 0;
  };
  struct Pit {
    void* base = nullptr;
    uint64_t length = 0;
  };
  void* pit(uint64_t length);

  fid_domain* domain_;
  std::deque<Trap> traps_;
  std::unordered_set<uint32_t> tags_;
  std::vector<Pit> pits_;  // the last one is the largest
};

}  // namespace asyncfabric::libfabric

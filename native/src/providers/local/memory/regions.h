// regions.h: the owner's registered memory: slots on the shared board, keys, and INV-3: no key of a revoked generation
// touches memory. Control thread registers, revokes and releases; the service thread looks up files; the lock's holder serves
// bounced transfers.
//   writer: active_slot = slot (seq_cst); generation != key's -> refuse; copy; active_slot = 0
//   owner:  change generation (seq_cst); wait until no active_slot names the slot, or its process is gone
// Copy engines go on after a post: for them one of held_slots stands in for active_slot until the copy has landed.
// So each copy that began under the old generation is over when revoke() returns, and none begins later.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"
#include "provider/provider.h"
#include "providers/local/memory/mapping.h"
#include "providers/local/memory/segment.h"

namespace asyncfabric::local {

struct RegionKey {
  uint32_t slot = 0;
  uint64_t generation = 0;
};

std::string encode_key(const RegionKey& key);
Status decode_key(std::string_view bytes, RegionKey* out);  // kInvalidArgument on anything odd

// Asked again and again about one slot (0-based) until true: each connection was seen once since the first question
// with another slot active, or its process is gone. Seen once is enough: whoever names the slot later finds the new
// generation.
using SlotIdle = std::function<bool(uint32_t slot)>;
using TakeCensus = std::function<SlotIdle()>;  // of the connections of this moment

class Regions {
 public:
  explicit Regions(std::shared_ptr<Mapping> board);

  // `files`: what peers map instead of `memory.memfd`, piece after piece.
  Status add(const Memory& memory, std::vector<UniqueFd> files, uint32_t* slot, std::string* key);
  Status revoke(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census, std::string* new_key);
  // kOk: nothing can touch the memory, the slot is free. kDrainTimeout: no new access begins, but one may still run.
  Status remove(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census);
  // All regions; used when the rail closes.
  Status remove_all(uint64_t deadline_ns, const TakeCensus& census);

  // A file behind a region, if `generation` is the present one. The descriptor is a duplicate.
  Status file(uint32_t slot, uint64_t generation, uint32_t part, UniqueFd* out) const;

  // Under the engine lock: our own copies for bounced transfers obey the same protocol.
  class Access {
   public:
    Access(Regions& regions, uint32_t slot, uint64_t generation, uint64_t offset, uint64_t length, uint32_t right);
    ~Access() { regions_.own_slot_.store(0, std::memory_order_release); }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
    Status status() const { return status_; }
    uint8_t* data() const { return data_; }

   private:
    Regions& regions_;
    Status status_;
    uint8_t* data_ = nullptr;
  };

 private:
  struct Held {
    std::vector<UniqueFd> files;
    uint64_t base = 0;
    uint64_t length = 0;
    uint64_t traits = 0;
    bool used = false;
  };

  RegionSlot& shared(uint32_t slot) const { return board_->as<Board>()->slots[slot]; }
  bool drain(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census) const;
  void publish(uint32_t slot, const Held& held, std::string* key);

  std::shared_ptr<Mapping> board_;
  mutable std::mutex mutex_;  // control and service thread; never held while draining
  std::vector<Held> held_;
  std::vector<uint32_t> free_;
  uint64_t next_generation_ = 1;
  uint64_t next_serial_ = 1;
  std::atomic<uint32_t> own_slot_{0};  // slot + 1 while the lock's holder copies for a peer. Partner: drain()
};

}  // namespace asyncfabric::local

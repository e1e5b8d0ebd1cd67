// regions.h: the owner's registered memory: slots on the shared board, grants, and INV-3: no key that was revoked touches memory.
// A grant is a random word: what its holder may do, and where, is looked up here, so no edit of a key widens it. Control thread registers,
// revokes and releases; any thread makes keys; the service thread shows memory to who has a word of it; the lock's holder serves bounced
// transfers.
//   writer: active_slot = slot (seq_cst); mark != the one shown -> refuse; copy; active_slot = 0
//   owner:  change mark (seq_cst); wait until no active_slot names the slot, or its process is gone
// Copy engines go on after a post: for them one of held_slots stands in for active_slot until the copy has landed.
// So each copy that began under the old mark is over when revoke() returns, and none begins later.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/unique_fd.h"
#include "provider/provider.h"
#include "providers/local/memory/mapping.h"
#include "providers/local/memory/segment.h"

namespace asyncfabric::local {

struct RegionKey {
  uint32_t slot = 0;
  uint64_t word = 0;  // of the grant
};

std::string encode_key(const RegionKey& key);
Status decode_key(std::string_view bytes, RegionKey* out);  // kInvalidArgument on anything odd

// What the holder of a grant learns of the memory. Traits: Access bits, and how the memory is reached.
constexpr uint64_t kTraitDevice = 1ull << 33;   // memory of a GPU: no processor may touch it
constexpr uint64_t kTraitByOwner = 1ull << 34;  // only through the owner's engine, which copies

struct Shown {
  uint64_t mark = 0;
  uint64_t life = 0;
  uint64_t base = 0;  // 0: no address helps
  uint64_t length = 0;
  uint64_t traits = 0;
};

// Asked again and again about one slot (0-based) until true: each connection was seen once since the first question
// with another slot active, or its process is gone. Seen once is enough: whoever names the slot later finds the new
// mark.
using SlotIdle = std::function<bool(uint32_t slot)>;
using TakeCensus = std::function<SlotIdle()>;  // of the connections of this moment

class Regions {
 public:
  explicit Regions(std::shared_ptr<Mapping> board) : board_(std::move(board)) {}

  // `files`: what peers map instead of `memory.memfd`, piece after piece.
  Status add(const Memory& memory, std::vector<UniqueFd> files, uint32_t* slot, std::string* key);
  Status narrow(uint32_t slot, const KeyScope& scope, std::string* key);
  Status revoke(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census, std::string* new_key);
  // kOk: nothing can touch the memory, the slot is free. kDrainTimeout: no new access begins, but one may still run.
  Status remove(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census);
  // All regions; used when the rail closes.
  Status remove_all(uint64_t deadline_ns, const TakeCensus& census);

  // What a key shows, and in `file` a duplicate of file `part` behind the region where the holder may map it; none otherwise.
  Status show(const RegionKey& key, uint32_t part, Shown* out, UniqueFd* file) const;

  // Under the engine lock: our own copies for bounced transfers obey the same protocol.
  class Access {
   public:
    Access(Regions& regions, const RegionKey& key, uint64_t offset, uint64_t length, uint32_t right);
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
    uint32_t access = 0;
    bool used = false;
    bool device = false;
    bool sealed = false;  // nobody can map or write the file any more but through the mapping that the owner has
    std::map<KeyScope, uint64_t> words;
    bool maps(const KeyScope& scope) const;
  };
  struct Grant {
    uint32_t slot = 0;
    KeyScope scope;
  };

  RegionSlot& shared(uint32_t slot) const { return board_->as<Board>()->slots[slot]; }
  bool drain(uint32_t slot, uint64_t deadline_ns, const TakeCensus& census) const;
  // With mutex_ held.
  std::string grant(uint32_t slot, const KeyScope& scope);
  void publish(uint32_t slot, std::string* key);
  void end_grants(uint32_t slot);
  const Grant* find(const RegionKey& key) const;

  std::shared_ptr<Mapping> board_;
  mutable std::mutex mutex_;  // held for a few instructions, never while draining
  std::vector<Held> held_;
  std::vector<uint32_t> free_;
  std::unordered_map<uint64_t, Grant> grants_;  // by word
  std::atomic<uint32_t> own_slot_{0};           // slot + 1 while the lock's holder copies for a peer. Partner: drain()
};

}  // namespace asyncfabric::local

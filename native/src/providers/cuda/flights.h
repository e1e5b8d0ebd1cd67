// flights.h: requests of one connection whose copies are under way, oldest first. They are reported in this order, so that an
// immediate never comes before the bytes of an earlier request of its peer. [engine lock]
// Also INV-3 for them: while a copy into a region is under way one of the connection's hold words names the region, and the
// owner's revoke waits for that word.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "providers/cuda/copy_queue.h"
#include "providers/local/peers/outgoing.h"

namespace asyncfabric::cuda {

struct Flight {
  uint64_t tag = 0;
  uint64_t ticket = 0;
  uint32_t imm = 0;
  Way way = Way::kOut;
  uint8_t hold = 0;
  bool has_imm = false;
  bool signalled = true;
};

class Flights final : public local::Companion {
 public:
  bool empty() const { return head_ == list_.size(); }
  const Flight& front() const { return list_[head_]; }
  void push(const Flight& flight) { list_.push_back(flight); }
  void pop() {
    if (++head_ == list_.size()) {
      list_.clear();
      head_ = 0;
    }
  }

  // A hold on the owner's region. False: as many regions as there are words are under way.
  bool hold(local::Outgoing& link, uint32_t slot, uint8_t* out) {
    size_t vacant = holds_.size();
    for (size_t i = 0; i < holds_.size(); ++i) {
      if (holds_[i].count == 0) {
        vacant = i;
      } else if (holds_[i].slot == slot) {
        ++holds_[i].count;
        *out = static_cast<uint8_t>(i);
        return true;
      }
    }
    if (vacant == holds_.size()) return false;
    holds_[vacant] = {slot, 1};
    // Partner: the owner stores the mark, then loads this; the caller loads the mark after it.
    link.ring.header().held_slots[vacant].store(slot + 1, std::memory_order_seq_cst);
    *out = static_cast<uint8_t>(vacant);
    return true;
  }
  void let_go(local::Outgoing& link, uint8_t hold) {
    if (--holds_[hold].count == 0) link.ring.header().held_slots[hold].store(0, std::memory_order_release);
  }

  bool listed = false;  // among those that the rail looks at

 private:
  struct Hold {
    uint32_t slot = 0;
    uint32_t count = 0;
  };
  std::array<Hold, local::kMaxHolds> holds_{};
  std::vector<Flight> list_;
  size_t head_ = 0;
};

}  // namespace asyncfabric::cuda

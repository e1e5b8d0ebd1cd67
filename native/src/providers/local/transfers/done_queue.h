// done_queue.h: completions between post() and the next poll(). [engine lock] Grows while the engine warms up, then never
// allocates.
#pragma once

#include <span>
#include <vector>

#include "provider/work.h"

namespace asyncfabric::local {

class DoneQueue {
 public:
  void push(uint64_t tag, Status status) { items_.push_back({tag, status}); }
  bool empty() const { return head_ == items_.size(); }

  size_t take(std::span<RailEvent> events) {
    size_t count = 0;
    while (count < events.size() && head_ < items_.size()) {
      RailEvent& event = events[count++];
      event = RailEvent();
      event.tag = items_[head_].tag;
      event.status = items_[head_++].status;
    }
    if (head_ == items_.size()) {
      items_.clear();
      head_ = 0;
    } else if (head_ >= kCompactFrom && head_ * 2 >= items_.size()) {
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(head_));
      head_ = 0;
    }
    return count;
  }

 private:
  static constexpr size_t kCompactFrom = 1024;
  struct Item {
    uint64_t tag;
    Status status;
  };
  std::vector<Item> items_;
  size_t head_ = 0;
};

}  // namespace asyncfabric::local

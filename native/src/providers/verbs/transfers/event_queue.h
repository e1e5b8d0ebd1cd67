// event_queue.h: events on their way to the engine, with the receive slot that a message occupies. Grows to what was ever needed,
// so a warm rail does not allocate. Under the engine lock only.
#pragma once

#include <utility>
#include <vector>

#include "provider/work.h"

namespace asyncfabric::verbs {

class EventQueue {
 public:
  struct Item {
    RailEvent event;
    uint32_t receive_slot = 0;
    uint32_t qpn = 0;   // that a message came through
    uint32_t life = 0;  // of the device, that both belong to
  };

  EventQueue() : items_(1024) {}
  bool empty() const { return first_ == end_; }
  size_t size() const { return end_ - first_; }
  void push(const Item& item) {
    if (size() == items_.size()) grow();
    items_[end_++ & (items_.size() - 1)] = item;
  }
  Item pop() { return items_[first_++ & (items_.size() - 1)]; }

 private:
  void grow() {
    std::vector<Item> larger(items_.size() * 2);
    for (size_t i = first_; i != end_; ++i) larger[i & (larger.size() - 1)] = items_[i & (items_.size() - 1)];
    items_ = std::move(larger);
  }

  std::vector<Item> items_;
  size_t first_ = 0;
  size_t end_ = 0;
};

}  // namespace asyncfabric::verbs

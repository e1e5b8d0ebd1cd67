// shut_out.h: connections of peers that the engine has lost, and that may live: what they bring is dropped. Their messages carry the number
// of their connection, and immediates a part of it where 64 bits travel with a write: over sockets. efa and ofi-verbs carry 32, which the
// engine's own numbers fill, so a late immediate of a lost peer is still reported there. Under the engine lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>

namespace asyncfabric::libfabric {

// The upper half of the 64 bits that travel with a write; 0: the sender names no connection.
constexpr uint32_t connection_tag(uint64_t connection) {
  const auto tag = static_cast<uint32_t>(connection);
  return tag != 0 ? tag : 1;
}

class ShutOut {
 public:
  static constexpr size_t kMost = 65536;  // a process that was stopped so many losses ago goes on no more

  void add(uint64_t connection) {
    const uint32_t tag = connection_tag(connection);
    if (!tags_.insert(tag).second) return;
    order_.push_back(tag);
    if (order_.size() <= kMost) return;
    tags_.erase(order_.front());
    order_.pop_front();
  }
  bool holds(uint32_t tag) const { return !tags_.empty() && tags_.contains(tag); }

 private:
  std::unordered_set<uint32_t> tags_;
  std::deque<uint32_t> order_;  // the oldest first
};

}  // namespace asyncfabric::libfabric

// admitted.h: which connections of peers have shown the engine's secret, where it has one. Over sockets an immediate carries 32 random bits of
// its connection's number and is dropped unless they are an admitted one's. Introductions of others are kept apart, so that they take no
// place of peers: the newest, until the engine admits their connection. [control] and [engine lock] calls, which never overlap on these rails.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>
#include <utility>

#include "providers/libfabric/peers/shut_out.h"
#include "providers/libfabric/peers/wire.h"

namespace asyncfabric::libfabric {

class Admitted {
 public:
  static constexpr size_t kMostStrangers = 1024;
  static constexpr size_t kMostOwn = 65536;

  void require() { required_ = true; }
  bool required() const { return required_; }
  bool takes(uint32_t tag) const { return !required_ || tags_.contains(tag); }
  void add(uint64_t connection) { tags_.insert(connection_tag(connection)); }
  void remove(uint64_t connection) { tags_.erase(connection_tag(connection)); }

  void keep(uint64_t connection, RailAddress sender) {
    strangers_.emplace_back(connection, std::move(sender));
    if (strangers_.size() > kMostStrangers) strangers_.pop_front();
  }
  // The introduction of this connection, which was kept. False: there is none.
  bool take(uint64_t connection, RailAddress* sender) {
    const auto found = std::find_if(strangers_.rbegin(), strangers_.rend(),
                                    [connection](const auto& one) { return one.first == connection; });
    if (found == strangers_.rend()) return false;
    *sender = std::move(found->second);
    strangers_.erase(std::next(found).base());
    return true;
  }

  // Connections of ours, also those that are closed: nobody else has reason to ask about one.
  void opened(uint64_t connection) {
    own_.push_back(connection);
    known_own_.insert(connection);
    if (own_.size() <= kMostOwn) return;
    known_own_.erase(own_.front());
    own_.pop_front();
  }
  bool is_own(uint64_t connection) const { return known_own_.contains(connection); }

 private:
  bool required_ = false;
  std::unordered_set<uint32_t> tags_;
  std::deque<std::pair<uint64_t, RailAddress>> strangers_;
  std::deque<uint64_t> own_;
  std::unordered_set<uint64_t> known_own_;
};

}  // namespace asyncfabric::libfabric

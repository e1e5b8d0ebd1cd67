// inbox.h: user messages that came, until the program takes them. The engine puts in and collects what was taken (engine lock); any
// thread takes. A taker bothers the engine only when it is due: a sender waits for room, or enough was taken to be worth a message.
// Proof that no sender is forgotten: a taker counts, then looks whether somebody waits; the engine notes that somebody waits, then looks
// at the count before it sleeps (Core::can_sleep). Both are seq_cst, so one of them sees the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "asyncfabric/types.h"

namespace asyncfabric {

constexpr uint32_t kCreditBatch = 16;  // messages that are taken before their sender learns of it, unless it waits

class Inbox {
 public:
  // Engine lock. True: no completion that announces messages is under way, so one has to be published.
  bool put(PeerId peer, std::string_view payload) {
    const std::lock_guard lock(mutex_);
    messages_.push_back({peer, std::string(payload)});
    count_.store(messages_.size(), std::memory_order_release);
    return !std::exchange(announced_, true);
  }

  bool empty() const { return count_.load(std::memory_order_acquire) == 0; }

  // Appends up to `capacity` messages, the oldest first. True: the engine is due. What comes once nothing is left is announced again, so
  // whoever waits has taken in vain before, and one announcement wakes all that wait.
  bool take(size_t capacity, std::vector<ReceivedMessage>* out) {
    const std::lock_guard lock(mutex_);
    const size_t count = std::min(capacity, messages_.size());
    for (size_t i = 0; i < count; ++i) {
      const PeerId peer = messages_.front().peer;
      if (taken_.empty() || taken_.back().peer != peer) taken_.push_back({peer, 0});
      ++taken_.back().count;
      out->push_back(std::move(messages_.front()));
      messages_.pop_front();
    }
    announced_ = !messages_.empty();
    count_.store(messages_.size(), std::memory_order_release);
    if (count == 0) return false;
    uncollected_.fetch_add(static_cast<uint32_t>(count), std::memory_order_seq_cst);
    return due();
  }

  bool due() const {
    const uint32_t uncollected = uncollected_.load(std::memory_order_seq_cst);
    return uncollected >= kCreditBatch || (uncollected != 0 && waiting_.load(std::memory_order_seq_cst) != 0);
  }

  // Engine lock: how many more senders wait for room.
  void add_waiting(int32_t senders) { waiting_.fetch_add(static_cast<uint32_t>(senders), std::memory_order_seq_cst); }

  // Engine lock: report(peer, how many of its messages were taken) for what was taken since the last time.
  template <class Report>
  void collect(Report report) {
    if (uncollected_.load(std::memory_order_seq_cst) == 0) return;
    {
      const std::lock_guard lock(mutex_);
      collected_.swap(taken_);
      uncollected_.store(0, std::memory_order_seq_cst);
    }
    for (const Taken& taken : collected_) report(taken.peer, taken.count);
    collected_.clear();
  }

 private:
  struct Taken {
    PeerId peer = 0;
    uint32_t count = 0;
  };

  std::mutex mutex_;
  std::deque<ReceivedMessage> messages_;  // these three are guarded by mutex_
  std::vector<Taken> taken_;
  bool announced_ = false;
  std::vector<Taken> collected_;  // engine lock; keeps its room

  std::atomic<size_t> count_{0};          // of messages_; partner: a spinning taker
  std::atomic<uint32_t> uncollected_{0};  // partner: takers add, the engine collects
  std::atomic<uint32_t> waiting_{0};      // partner: the engine writes, takers look
};

}  // namespace asyncfabric

// ring.h: the two ends of a connection's ring of entries, and the producer's allocator of staging bytes.
// Producer: the connector's engine lock. Consumer: the acceptor's engine lock. Neither trusts the other's words: a lying consumer
// harms only the producer's own stream, a lying producer only its own ring.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "providers/local/memory/mapping.h"
#include "providers/local/memory/segment.h"
#include "providers/local/transfers/barrier.h"

namespace asyncfabric::local {

class RingProducer {
 public:
  RingProducer(std::shared_ptr<Mapping> segment, uint32_t entries)
      : segment_(std::move(segment)),
        layout_(entries),
        header_(segment_->as<SegmentHeader>()),
        ring_(segment_->as<Entry>(layout_.ring())),
        spans_(entries) {}

  // Room for `count` more entries?
  bool has_room(uint64_t count) {
    if (tail_ + count - head_ <= layout_.entries) return true;
    refresh();
    return tail_ + count - head_ <= layout_.entries;
  }

  // Asks the consumer to ring our doorbell when it has consumed something. True: there is room already.
  bool ask_for_room(uint64_t count) {
    header_->producer_waiting.store(1, std::memory_order_seq_cst);
    store_load_barrier();
    return has_room(count);
  }

  // Returns the entry's position. Call only with room: without it an unread entry is overwritten, and the consumer waits for ever.
  uint64_t publish(const EntryBody& body) {
    Entry& entry = ring_[tail_ & (layout_.entries - 1)];
    uint64_t words[kEntryWords];
    std::memcpy(words, &body, sizeof body);
    for (size_t i = 0; i < kEntryWords; ++i) entry.words[i].store(words[i], std::memory_order_relaxed);
    entry.sequence.store(tail_ + 1, std::memory_order_release);
    return tail_++;
  }

  uint64_t tail() const { return tail_; }

  uint64_t consumed() {
    refresh();
    return head_;
  }

  // As of the last look: what a refusal for want of room was based on.
  uint64_t seen_consumed() const { return head_; }

  // The consumer's verdict on a bounced entry that it has consumed.
  uint32_t result(uint64_t position) const {
    auto* results = segment_->as<std::atomic<uint32_t>>(layout_.results());
    return results[position & (layout_.entries - 1)].load(std::memory_order_relaxed);
  }

  // Bytes that stay ours until the entry that the caller publishes next is consumed and `keep_from` lies behind it. `keep_from` is the
  // oldest entry whose verdict was not taken: there is a place for the verdicts of `entries` entries, so none so far behind it has one.
  bool reserve(uint32_t length, uint64_t keep_from, uint32_t* offset) {
    reclaim(keep_from);
    if (keep_from <= tail_ && tail_ - keep_from >= layout_.entries) return false;
    if (span_count_ == 0) begin_ = end_ = 0;  // start over: light use stays within few pages
    uint32_t at = end_;
    if (span_count_ > 0 && end_ <= begin_) {
      if (begin_ - end_ < length) return false;
    } else if (kStagingBytes - end_ < length) {
      if (span_count_ > 0 && begin_ < length) return false;
      at = 0;
    }
    if (span_count_ == spans_.size()) return false;
    end_ = at + length;
    spans_[(first_span_ + span_count_++) % spans_.size()] = {tail_, at};
    *offset = at;
    return true;
  }

  uint8_t* staging(uint32_t offset) const { return segment_->data() + layout_.staging() + offset; }
  SegmentHeader& header() const { return *header_; }

 private:
  struct Span {
    uint64_t position;
    uint32_t begin;
  };

  void refresh() {
    const uint64_t head = header_->head.load(std::memory_order_acquire);
    if (head > head_ && head <= tail_) head_ = head;  // anything else is a lie and changes nothing
  }

  void reclaim(uint64_t keep_from) {
    refresh();
    const uint64_t free_below = head_ < keep_from ? head_ : keep_from;
    while (span_count_ > 0 && spans_[first_span_].position < free_below) {
      first_span_ = (first_span_ + 1) % spans_.size();
      --span_count_;
    }
    if (span_count_ > 0) begin_ = spans_[first_span_].begin;
  }

  std::shared_ptr<Mapping> segment_;
  SegmentLayout layout_;
  SegmentHeader* header_;
  Entry* ring_;
  uint64_t tail_ = 0;
  uint64_t head_ = 0;
  std::vector<Span> spans_;  // live staging spans, oldest first
  size_t first_span_ = 0;
  size_t span_count_ = 0;
  uint32_t begin_ = 0;  // of the oldest live span
  uint32_t end_ = 0;    // of the newest
};

class RingConsumer {
 public:
  RingConsumer(std::shared_ptr<Mapping> segment, uint32_t entries)
      : segment_(std::move(segment)),
        layout_(entries),
        header_(segment_->as<SegmentHeader>()),
        ring_(segment_->as<Entry>(layout_.ring())) {}

  bool has_entry() const {
    return ring_[head_ & (layout_.entries - 1)].sequence.load(std::memory_order_acquire) == head_ + 1;
  }

  // A private copy of the next entry, which stays in the ring until advance(). Call only after has_entry().
  void read(EntryBody* body) const {
    const Entry& entry = ring_[head_ & (layout_.entries - 1)];
    uint64_t words[kEntryWords];
    for (size_t i = 0; i < kEntryWords; ++i) words[i] = entry.words[i].load(std::memory_order_relaxed);
    std::memcpy(static_cast<void*>(body), words, sizeof words);
  }

  void set_result(uint32_t status) {
    auto* results = segment_->as<std::atomic<uint32_t>>(layout_.results());
    results[head_ & (layout_.entries - 1)].store(status, std::memory_order_relaxed);  // ordered by the release of head
  }

  void advance() { ++head_; }

  // Gives the entries back. True: the producer waits for room and wants to be woken. `look`: ask even after few
  // entries, since they freed staging bytes.
  bool give_back(bool look) {
    const uint64_t freed = head_ - given_back_;
    if (freed == 0) return false;
    header_->head.store(head_, std::memory_order_release);
    given_back_ = head_;
    unchecked_ += freed;
    // A full producer has `entries` unread entries, so a quarter of them always passes through here after it began to
    // wait.
    if (!look && unchecked_ < layout_.entries / 4) return false;
    unchecked_ = 0;
    store_load_barrier();
    return header_->producer_waiting.load(std::memory_order_relaxed) != 0 &&
           header_->producer_waiting.exchange(0, std::memory_order_seq_cst) != 0;
  }

  // `length` staging bytes at `offset`, or null when the producer's words leave the area.
  uint8_t* staging(uint32_t offset, uint32_t length) const {
    if (offset > kStagingBytes || length > kStagingBytes - offset) return nullptr;
    return segment_->data() + layout_.staging() + offset;
  }

  // Does the producer report that it may be touching the region?
  bool names(uint32_t slot) const {
    if (header_->active_slot.load(std::memory_order_seq_cst) == slot + 1) return true;
    for (const std::atomic<uint32_t>& held : header_->held_slots)
      if (held.load(std::memory_order_seq_cst) == slot + 1) return true;
    return false;
  }

 private:
  std::shared_ptr<Mapping> segment_;
  SegmentLayout layout_;
  SegmentHeader* header_;
  Entry* ring_;
  uint64_t head_ = 0;
  uint64_t given_back_ = 0;
  uint64_t unchecked_ = 0;
};

}  // namespace asyncfabric::local

// receiver.cc: see receiver.h.
#include "providers/local/transfers/receiver.h"

#include <bit>
#include <utility>

#include "providers/local/transfers/barrier.h"

namespace asyncfabric::local {

size_t Receiver::drain_one(Incoming& incoming, std::span<RailEvent> events) {
  const size_t count = incoming.drain(events, shelf_, regions_, copier_);
  if (incoming.broken()) incoming.hang_up();  // the service thread ends it, which brings it to drain_leaving()
  return count;
}

size_t Receiver::drain(std::span<RailEvent> events) {
  size_t count = 0;
  if (++turn_ >= hot_count_) turn_ = 0;
  for (size_t i = 0, seat = turn_; i < hot_count_ && count < events.size(); ++i) {
    if (hot_[seat]->has_entry()) count += drain_one(*hot_[seat], events.subspan(count));
    if (++seat >= hot_count_) seat = 0;
  }
  const uint32_t words = connections_.words();
  for (uint32_t word = 0; word < words; ++word) {
    // Partner: the sender's fetch_or after it published.
    uint64_t bits = own_->bell().dirty[word].load(std::memory_order_acquire) & ~hot_mask_[word];
    for (; bits != 0 && count < events.size(); bits &= bits - 1) {
      Incoming* incoming = promote(word * 64 + static_cast<uint32_t>(std::countr_zero(bits)));
      if (incoming != nullptr) count += drain_one(*incoming, events.subspan(count));
    }
  }
  return count;
}

Incoming* Receiver::promote(uint32_t index) {
  Incoming* incoming = connections_.at(index);
  if (incoming == nullptr) {  // nobody sits there: a stray or hostile bit
    own_->bell().dirty[index / 64].fetch_and(~(1ull << (index % 64)), std::memory_order_seq_cst);
    return nullptr;
  }
  if (hot_count_ == kHotSeats) {
    cool(victim_);
    victim_ = (victim_ + 1) % kHotSeats;
  }
  hot_[hot_count_++] = incoming;
  hot_mask_[index / 64] |= 1ull << (index % 64);
  return incoming;
}

void Receiver::cool(size_t seat) {
  Incoming& incoming = *hot_[seat];
  hot_[seat] = hot_[--hot_count_];
  const uint64_t bit = 1ull << (incoming.index() % 64);
  std::atomic<uint64_t>& word = own_->bell().dirty[incoming.index() / 64];
  hot_mask_[incoming.index() / 64] &= ~bit;
  word.fetch_and(~bit, std::memory_order_seq_cst);
  store_load_barrier();
  if (incoming.has_entry()) word.fetch_or(bit, std::memory_order_seq_cst);
}

void Receiver::add_leaving(std::vector<std::shared_ptr<Incoming>>& leaving) {
  for (auto& incoming : leaving) leaving_.push_back(std::move(incoming));
  leaving.clear();
}

size_t Receiver::drain_leaving(std::span<RailEvent> events) {
  size_t count = 0;
  while (!leaving_.empty()) {
    Incoming& incoming = *leaving_.back();
    count += incoming.drain(events.subspan(count), shelf_, regions_, copier_);
    if (incoming.has_entry()) break;  // events or shelf are full: the rest comes with the next poll
    for (size_t seat = 0; seat < hot_count_; ++seat)
      if (hot_[seat] == &incoming) {
        cool(seat);
        break;
      }
    own_->bell().dirty[incoming.index() / 64].fetch_and(~(1ull << (incoming.index() % 64)), std::memory_order_seq_cst);
    connections_.retire(incoming.index());
    leaving_.pop_back();
  }
  return count;
}

bool Receiver::has_work() const {
  if (!leaving_.empty()) return true;
  for (size_t seat = 0; seat < hot_count_; ++seat)
    if (hot_[seat]->has_entry()) return true;
  const uint32_t words = connections_.words();
  for (uint32_t word = 0; word < words; ++word) {
    uint64_t bits = own_->bell().dirty[word].load(std::memory_order_seq_cst) & ~hot_mask_[word];
    for (; bits != 0; bits &= bits - 1) {
      const Incoming* incoming = connections_.at(word * 64 + static_cast<uint32_t>(std::countr_zero(bits)));
      if (incoming != nullptr && incoming->has_entry()) return true;
    }
  }
  return false;
}

}  // namespace asyncfabric::local

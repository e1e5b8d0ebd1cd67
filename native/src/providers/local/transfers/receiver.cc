// receiver.cc: see receiver.h.
#include "providers/local/transfers/receiver.h"

#include <algorithm>
#include <utility>

namespace asyncfabric::local {

size_t Receiver::drain_one(Incoming& incoming, std::span<RailEvent> events) {
  const size_t count = incoming.drain(events, shelf_, regions_, copier_);
  if (incoming.broken()) incoming.hang_up();  // the service thread ends it, which brings it to drain_leaving()
  return count;
}

size_t Receiver::drain(std::span<RailEvent> events) {
  if (connections_.seats() == hot_count_) return drain_hot(events);
  cold_first_ = !cold_first_;
  if (cold_first_) {
    const size_t count = drain_cold(events);
    return count + drain_hot(events.subspan(count));
  }
  const size_t count = drain_hot(events);
  return count + drain_cold(events.subspan(count));
}

size_t Receiver::drain_hot(std::span<RailEvent> events) {
  size_t count = 0;
  if (++turn_ >= hot_count_) turn_ = 0;
  for (size_t i = 0, seat = turn_; i < hot_count_ && count < events.size(); ++i) {
    if (hot_[seat]->has_entry()) count += drain_one(*hot_[seat], events.subspan(count));
    if (++seat >= hot_count_) seat = 0;
  }
  return count;
}

size_t Receiver::drain_cold(std::span<RailEvent> events) {
  const uint32_t seats = connections_.seats();
  size_t count = 0;
  const uint32_t looks = std::exchange(everywhere_, false) ? seats : std::min(seats, kColdLooks);
  for (uint32_t look = 0; look < looks && count < events.size(); ++look) {
    if (cold_turn_ >= seats) cold_turn_ = 0;
    const uint32_t index = cold_turn_++;
    Incoming* incoming = connections_.at(index);
    if (incoming == nullptr || is_hot(index) || !incoming->has_entry()) continue;
    promote(*incoming);
    count += drain_one(*incoming, events.subspan(count));
  }
  return count;
}

void Receiver::promote(Incoming& incoming) {
  if (hot_count_ == kHotSeats) {
    cool(victim_);
    victim_ = (victim_ + 1) % kHotSeats;
  }
  hot_[hot_count_++] = &incoming;
  hot_mask_[incoming.index() / 64] |= 1ull << (incoming.index() % 64);
}

void Receiver::cool(size_t seat) {
  const uint32_t index = hot_[seat]->index();
  hot_[seat] = hot_[--hot_count_];
  hot_mask_[index / 64] &= ~(1ull << (index % 64));
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
    if (is_hot(incoming.index()))
      cool(static_cast<size_t>(std::find(hot_.begin(), hot_.begin() + hot_count_, &incoming) - hot_.begin()));
    connections_.retire(incoming.index());
    leaving_.pop_back();
  }
  return count;
}

// The next poll begins where something was found.
bool Receiver::has_work() {
  if (!leaving_.empty()) return true;
  for (size_t seat = 0; seat < hot_count_; ++seat)
    if (hot_[seat]->has_entry()) return true;
  const uint32_t seats = connections_.seats();
  for (uint32_t index = 0; index < seats && seats != hot_count_; ++index) {
    const Incoming* incoming = connections_.at(index);
    if (incoming == nullptr || is_hot(index) || !incoming->has_entry()) continue;
    cold_turn_ = index;
    return true;
  }
  return false;
}

}  // namespace asyncfabric::local

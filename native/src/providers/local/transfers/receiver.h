// receiver.h: the receiving half of a rail. [engine lock] Each connection's ring is looked at where it lies; no word is shared by several
// peers, so none of them can make another's news disappear. Connections that sent lately are "hot" and looked at by each poll. The others
// take turns, a few in a poll; after a sleep, and before one, all are looked at.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "providers/local/peers/connection_table.h"

namespace asyncfabric::local {

class Receiver {
 public:
  Receiver(ConnectionTable& connections, Regions& regions, const Copier& copier)
      : connections_(connections), regions_(regions), copier_(copier) {}

  void begin_poll() { shelf_.clear(); }  // messages of the last poll are gone
  size_t drain(std::span<RailEvent> events);
  void look_everywhere() { everywhere_ = true; }  // with the next poll
  // Takes what connections that end have left, up to the size of `events`, and retires them.
  size_t drain_leaving(std::span<RailEvent> events);
  void add_leaving(std::vector<std::shared_ptr<Incoming>>& leaving);
  bool has_leaving() const { return !leaving_.empty(); }
  bool has_work();

 private:
  static constexpr size_t kHotSeats = 16;
  static constexpr uint32_t kColdLooks = 16;  // in one poll

  size_t drain_one(Incoming& incoming, std::span<RailEvent> events);
  size_t drain_hot(std::span<RailEvent> events);
  size_t drain_cold(std::span<RailEvent> events);
  void promote(Incoming& incoming);
  void cool(size_t seat);
  bool is_hot(uint32_t index) const { return (hot_mask_[index / 64] >> (index % 64) & 1) != 0; }

  ConnectionTable& connections_;
  Regions& regions_;
  const Copier& copier_;
  MessageShelf shelf_;
  std::array<Incoming*, kHotSeats> hot_{};
  size_t hot_count_ = 0;
  size_t turn_ = 0;          // whose turn it is to be first
  bool cold_first_ = false;  // every other poll: neither kind can keep the other waiting by filling each poll
  size_t victim_ = 0;        // whose turn it is to be cooled
  uint32_t cold_turn_ = 0;   // the seat that is looked at next
  bool everywhere_ = false;
  std::array<uint64_t, kMaxConnections / 64> hot_mask_{};
  std::vector<std::shared_ptr<Incoming>> leaving_;
};

}  // namespace asyncfabric::local

// receiver.h: the receiving half of a rail. [engine lock] Connections that sent lately are "hot": their rings are looked at
// directly and their bit in the bell stays set, so a busy sender touches no shared word but its own ring. The others
// are found by their bit.
//   sender: publish; barrier; bit clear -> set it
//   demote: clear the bit; barrier; ring not empty -> set it again
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "providers/local/peers/connection_table.h"
#include "providers/local/transfers/doorbell.h"

namespace asyncfabric::local {

class Receiver {
 public:
  Receiver(std::shared_ptr<Doorbell> own, ConnectionTable& connections, Regions& regions, const Copier& copier)
      : own_(std::move(own)), connections_(connections), regions_(regions), copier_(copier) {}

  void begin_poll() { shelf_.clear(); }  // messages of the last poll are gone
  size_t drain(std::span<RailEvent> events);
  // Takes what connections that end have left, up to the size of `events`, and retires them.
  size_t drain_leaving(std::span<RailEvent> events);
  void add_leaving(std::vector<std::shared_ptr<Incoming>>& leaving);
  bool has_leaving() const { return !leaving_.empty(); }
  bool has_work() const;

 private:
  static constexpr size_t kHotSeats = 16;

  size_t drain_one(Incoming& incoming, std::span<RailEvent> events);
  Incoming* promote(uint32_t index);
  void cool(size_t seat);
  bool is_hot(uint32_t index) const { return (hot_mask_[index / 64] >> (index % 64) & 1) != 0; }

  std::shared_ptr<Doorbell> own_;
  ConnectionTable& connections_;
  Regions& regions_;
  const Copier& copier_;
  MessageShelf shelf_;
  std::array<Incoming*, kHotSeats> hot_{};
  size_t hot_count_ = 0;
  size_t turn_ = 0;    // whose turn it is to be first
  size_t victim_ = 0;  // whose turn it is to be cooled
  std::array<uint64_t, kBellWords> hot_mask_{};
  std::vector<std::shared_ptr<Incoming>> leaving_;
};

}  // namespace asyncfabric::local

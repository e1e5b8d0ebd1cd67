// connection_table.h: who is connected to a rail, both ways, and the news that the service thread has for the lock's holder.
// One mutex; the lock's holder takes it only when has_news() is true, never per transfer.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "providers/local/memory/regions.h"
#include "providers/local/peers/incoming.h"
#include "providers/local/peers/outgoing.h"

namespace asyncfabric::local {

class ConnectionTable {
 public:
  explicit ConnectionTable(std::shared_ptr<WaitSet> waits) : waits_(std::move(waits)) {}

  // [service]
  bool has_seat() const;
  std::shared_ptr<Incoming> seat(Incoming::Parts parts);  // call only with a free seat
  void leave(std::shared_ptr<Incoming>
                 incoming);  // the peer hung up or died: the lock's holder takes what is left, then retires it
  void lose_process(const ProcessWatch* process);  // all outgoing connections to it ended

  // Any thread.
  void lose(uint64_t serial);  // an outgoing connection ended

  // [control]
  void enlist(std::shared_ptr<Outgoing> link, RailPeer* handle);
  void forget(uint64_t serial);  // the handle goes away: no event may name it any more
  SlotIdle census() const;

  // [engine lock]
  Incoming* at(uint32_t index) const { return seats_[index].load(std::memory_order_acquire); }
  uint32_t seats() const {
    return seats_used_.load(std::memory_order_acquire);
  }  // that were ever taken: at() knows no more
  bool has_news() const { return news_.load(std::memory_order_acquire); }
  void take_news(std::vector<std::shared_ptr<Incoming>>* leaving, std::vector<std::shared_ptr<Outgoing>>* lost);
  void retire(uint32_t index);
  void shut_out(uint64_t number);
  // From here on connections bring messages only and get no files, until they are admitted. Any thread.
  void require_admission();
  bool asks_admission() const;
  bool admit(uint64_t number);                      // [engine lock] false: it has left
  RailPeer* handle_of(const Outgoing& link) const;  // null: forgotten

 private:
  struct Contact {
    std::shared_ptr<Outgoing> link;
    RailPeer* handle = nullptr;
  };

  void mark_lost(const Contact& contact);
  void notify_engine();

  std::shared_ptr<WaitSet> waits_;
  mutable std::mutex mutex_;
  std::array<std::atomic<Incoming*>, kMaxConnections>
      seats_{};  // partner: service stores, engine lock loads and clears
  std::array<std::shared_ptr<Incoming>, kMaxConnections> owners_;
  std::vector<uint32_t> free_;
  std::atomic<uint32_t> seats_used_{0};  // partner: service stores under the mutex, engine lock loads
  uint64_t numbers_ = 0;                 // given to connections
  std::map<uint64_t, Contact> contacts_;
  std::vector<std::shared_ptr<Incoming>> leaving_;
  std::vector<std::shared_ptr<Outgoing>> lost_;
  bool asks_admission_ = false;    // guarded by mutex_
  std::atomic<bool> news_{false};  // partner: service stores true after the lists, the lock's holder exchanges it
};

}  // namespace asyncfabric::local

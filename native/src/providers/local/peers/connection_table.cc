// connection_table.cc: see connection_table.h.
#include "providers/local/peers/connection_table.h"

#include <algorithm>

#include "providers/local/transfers/barrier.h"

namespace asyncfabric::local {

bool ConnectionTable::has_seat() const {
  const std::lock_guard lock(mutex_);
  return !free_.empty() || seats() < kMaxConnections;
}

std::shared_ptr<Incoming> ConnectionTable::seat(Incoming::Parts parts) {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    free_.push_back(seats());
    seats_used_.store(seats() + 1, std::memory_order_release);
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  owners_[index] = std::make_shared<Incoming>(index, ++numbers_, std::move(parts));
  owners_[index]->admit(!asks_admission_);
  seats_[index].store(owners_[index].get(), std::memory_order_release);
  return owners_[index];
}

void ConnectionTable::leave(std::shared_ptr<Incoming> incoming) {
  {
    const std::lock_guard lock(mutex_);
    leaving_.push_back(std::move(incoming));
  }
  notify_engine();
}

void ConnectionTable::lose(uint64_t serial) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = contacts_.find(serial);
    if (found == contacts_.end()) return;
    mark_lost(found->second);
  }
  notify_engine();
}

void ConnectionTable::lose_process(const ProcessWatch* process) {
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [serial, contact] : contacts_)
      if (contact.link->process.get() == process) mark_lost(contact);
  }
  notify_engine();
}

void ConnectionTable::mark_lost(const Contact& contact) {
  if (!contact.link->lost.exchange(true, std::memory_order_acq_rel)) lost_.push_back(contact.link);
}

void ConnectionTable::notify_engine() {
  news_.store(true, std::memory_order_seq_cst);
  store_load_barrier();
  waits_->wake();
}

void ConnectionTable::enlist(std::shared_ptr<Outgoing> link, RailPeer* handle) {
  const std::lock_guard lock(mutex_);
  const uint64_t serial = link->serial;
  contacts_[serial] = {std::move(link), handle};
}

void ConnectionTable::forget(uint64_t serial) {
  const std::lock_guard lock(mutex_);
  contacts_.erase(serial);
}

SlotIdle ConnectionTable::census() const {
  std::vector<std::shared_ptr<Incoming>> present;
  {
    const std::lock_guard lock(mutex_);
    for (uint32_t index = 0; index < seats(); ++index)
      if (owners_[index] != nullptr) present.push_back(owners_[index]);
  }
  return [present = std::move(present)](uint32_t slot) mutable {
    std::erase_if(present, [slot](const auto& incoming) { return !incoming->may_touch(slot); });
    return present.empty();
  };
}

void ConnectionTable::take_news(std::vector<std::shared_ptr<Incoming>>* leaving,
                                std::vector<std::shared_ptr<Outgoing>>* lost) {
  if (!news_.exchange(false, std::memory_order_acq_rel)) return;
  const std::lock_guard lock(mutex_);
  for (auto& incoming : leaving_) leaving->push_back(std::move(incoming));
  for (auto& link : lost_) lost->push_back(std::move(link));
  leaving_.clear();
  lost_.clear();
}

void ConnectionTable::retire(uint32_t index) {
  std::shared_ptr<Incoming> last;  // unmapped after the lock
  const std::lock_guard lock(mutex_);
  last = std::move(owners_[index]);
  seats_[index].store(nullptr, std::memory_order_release);
  free_.push_back(index);
}

// Its sender learns of it, as if this rail had closed.
void ConnectionTable::shut_out(uint64_t number) {
  const std::lock_guard lock(mutex_);
  for (const auto& incoming : owners_)
    if (incoming != nullptr && incoming->number() == number) {
      incoming->shut_out();
      incoming->hang_up();
    }
}

void ConnectionTable::require_admission() {
  const std::lock_guard lock(mutex_);
  asks_admission_ = true;
  for (const auto& incoming : owners_)  // since the rail began to listen
    if (incoming != nullptr) incoming->admit(false);
}

bool ConnectionTable::asks_admission() const {
  const std::lock_guard lock(mutex_);
  return asks_admission_;
}

bool ConnectionTable::admit(uint64_t number) {
  const std::lock_guard lock(mutex_);
  for (uint32_t index = 0; index < seats(); ++index)
    if (owners_[index] != nullptr && owners_[index]->number() == number) {
      owners_[index]->admit(true);
      return true;
    }
  return false;
}

RailPeer* ConnectionTable::handle_of(const Outgoing& link) const {
  const std::lock_guard lock(mutex_);
  const auto found = contacts_.find(link.serial);
  return found == contacts_.end() ? nullptr : found->second.handle;
}

}  // namespace asyncfabric::local

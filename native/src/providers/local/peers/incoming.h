// incoming.h: a peer's connection to us, the receiving end. The service thread makes it, the lock's holder drains it, the
// control thread looks at its active slot. Everything read from the segment is treated as hostile.
#pragma once

#include <sys/socket.h>
#include <atomic>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "provider/provider.h"
#include "providers/local/memory/regions.h"
#include "providers/local/peers/process_watch.h"
#include "providers/local/transfers/copy.h"
#include "providers/local/transfers/doorbell.h"
#include "providers/local/transfers/ring.h"

namespace asyncfabric::local {

// Private copies of received messages, valid until the next poll.
class MessageShelf {
 public:
  MessageShelf() : bytes_(std::make_unique_for_overwrite<uint8_t[]>(kShelfBytes)) {}
  void clear() { used_ = 0; }
  uint8_t* take(uint32_t length) {
    if (kShelfBytes - used_ < length) return nullptr;
    uint8_t* at = bytes_.get() + used_;
    used_ += length;
    return at;
  }

 private:
  static constexpr size_t kShelfBytes = 32 * kMaxSendBytes;  // touched only as far as a poll needs
  std::unique_ptr<uint8_t[]> bytes_;
  size_t used_ = 0;
};

class Incoming {
 public:
  // What the handshake gave.
  struct Parts {
    UniqueFd socket;
    std::shared_ptr<Mapping> segment;
    uint32_t entries = 0;
    std::unique_ptr<Doorbell> producer;
    std::shared_ptr<ProcessWatch> process;
  };
  Incoming(uint32_t index, uint64_t number, Parts parts)
      : index_(index),
        number_(number),
        socket_(std::move(parts.socket)),
        ring_(std::move(parts.segment), parts.entries),
        producer_(std::move(parts.producer)),
        process_(std::move(parts.process)) {}

  uint32_t index() const { return index_; }
  uint64_t number() const { return number_; }  // of all connections to this rail: no later one has it
  int socket() const { return socket_.get(); }
  const ProcessWatch* process() const { return process_.get(); }
  void hang_up() const { shutdown(socket_.get(), SHUT_RDWR); }  // any thread: both ends learn of it

  // Any thread: may the peer still be copying into `slot`? A stranger without the fabric's secret got no file, whatever it claims. Its words
  // are read first: a peer makes them after it was admitted.
  bool may_touch(uint32_t slot) const { return ring_.names(slot) && admitted() && !process_->gone(); }

  // [engine lock] Moves entries into `events`; returns how many. Stops when events or shelf are full.
  size_t drain(std::span<RailEvent> events, MessageShelf& shelf, Regions& regions, const Copier& copier);
  bool has_entry() const { return !broken_ && ring_.has_entry(); }
  // [engine lock] The peer wrote nonsense: the connection is to be closed.
  bool broken() const { return broken_; }
  // [engine lock] Nothing that it brings counts, moves or is reported from here on.
  void shut_out() { shut_out_ = true; }
  // [engine lock] Until then it brings messages only. Partner: the service thread asks before it hands out files.
  void admit(bool yes) { admitted_.store(yes, std::memory_order_release); }
  bool admitted() const { return admitted_.load(std::memory_order_acquire); }

 private:
  StatusCode bounce(const EntryBody& body, Regions& regions, const Copier& copier);

  uint32_t index_;
  uint64_t number_;
  UniqueFd socket_;
  RingConsumer ring_;
  std::unique_ptr<Doorbell> producer_;
  std::shared_ptr<ProcessWatch> process_;
  uint32_t imms_taken_ = 0;  // of the entry at the head of the ring
  bool broken_ = false;
  bool shut_out_ = false;
  std::atomic<bool> admitted_{true};
};

}  // namespace asyncfabric::local

// outgoing.h: our connection to a peer rail, the sending end, and the handles that the engine holds for it.
// The control thread makes and destroys it, the lock's holder posts on it, the service thread marks it lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "provider/provider.h"
#include "providers/local/peers/process_watch.h"
#include "providers/local/peers/wire.h"
#include "providers/local/transfers/doorbell.h"
#include "providers/local/transfers/ring.h"

namespace asyncfabric::local {

// How memory that is no memfd is reached.
enum class ForeignPath { kDirect, kKernelCopy, kBounce };

// A completion that waits for an earlier bounced transfer, or is one.
struct Deferred {
  uint64_t position = 0;  // of the ring entry whose result is awaited
  uint64_t tag = 0;
  Status status;                // of an already finished request
  void* read_target = nullptr;  // kBounceRead: where the staged bytes go
  uint32_t staging = 0;
  uint32_t length = 0;
  bool awaits = false;
  bool signalled = true;
};

// What a rail built on this one keeps per connection.
class Companion {
 public:
  virtual ~Companion() = default;
};

class PeerHandle;

// What the owner of memory is asked to show. Whoever reads the socket hands each answer to the question that it belongs to.
struct Question {
  uint32_t number = 0;
  bool answered = false;
  WireMessage answer{};
  UniqueFd file;
};

struct Outgoing : std::enable_shared_from_this<Outgoing> {
  Outgoing(std::shared_ptr<Mapping> segment, uint32_t entries) : ring(std::move(segment), entries) {}

  const Board& board() const { return target->board(); }
  bool alive() const {
    return !lost.load(std::memory_order_acquire) && !closed && board().closed.load(std::memory_order_relaxed) == 0;
  }

  // Set before the connection is shared between threads.
  uint64_t serial = 0;
  UniqueFd socket;
  std::unique_ptr<Doorbell> target;
  std::shared_ptr<ProcessWatch> process;
  uint32_t asked = 0;                              // [control] number of the newest question on the socket
  std::vector<std::weak_ptr<Question>> questions;  // [control] the handles that are being attached own them
  std::atomic<bool> lost{false};                   // partner: service thread stores, engine lock loads

  // [engine lock]
  RingProducer ring;
  ForeignPath foreign = ForeignPath::kKernelCopy;
  uint64_t seen_alive_ns = 0;  // when the target's process was last known not to be dead
  EntryBody batch{};           // immediates not yet in the ring
  uint64_t batch_bytes = 0;    // payload moved since the batch began
  bool touched = false;        // entries were published that the target may not know of
  bool closed = false;
  bool blocked = false;            // its last post was refused for want of room,
  uint64_t blocked_at = 0;         // when so much had been consumed
  bool waits = false;              // is in the list of connections with deferred completions
  std::vector<Deferred> deferred;  // FIFO: [deferred_head, size)
  size_t deferred_head = 0;
  std::unique_ptr<Companion> companion;
  PeerHandle* handle = nullptr;  // while the engine has one

  bool has_deferred() const { return deferred_head < deferred.size(); }
  // The front always awaits: only requests behind a bounced one are deferred, and settle() takes them along with it.
  uint64_t oldest_awaited() const { return has_deferred() ? deferred[deferred_head].position : ~uint64_t{0}; }
};

// What the engine holds for the connection. `on_close` ends it.
class PeerHandle : public RailPeer {
 public:
  explicit PeerHandle(std::shared_ptr<Outgoing> outgoing, std::function<void(Outgoing&)> on_close)
      : link(std::move(outgoing)), on_close_(std::move(on_close)) {
    link->handle = this;
  }
  ~PeerHandle() override {
    link->handle = nullptr;
    on_close_(*link);
  }
  bool lost() const override { return link->lost.load(std::memory_order_acquire); }
  const std::shared_ptr<Outgoing> link;

 private:
  std::function<void(Outgoing&)> on_close_;
};

class RemoteHandle : public RemoteMemory {
 public:
  std::shared_ptr<uint8_t> mapped(uint64_t offset, uint64_t bytes) const override {
    const bool inside = offset <= length && bytes <= length - offset;
    if (!inside || mapping == nullptr || direct == nullptr || (access & kAccessRemoteWrite) == 0) return nullptr;
    return {mapping, direct + offset};
  }

  // [control] An attachment that waits for its owner's answer.
  bool begun() const { return question != nullptr || !files.empty(); }

  std::shared_ptr<Question> question;  // [control] the open one, while it is attached
  std::vector<UniqueFd> files;         // [control] that the owner has shown, likewise
  std::shared_ptr<Outgoing> link;      // set when the owner has shown the first
  std::shared_ptr<Mapping> mapping;    // keeps `direct` alive
  uint8_t* direct = nullptr;           // where a plain copy reaches the memory; null: kernel copy or bounce
  uint64_t base = 0;                   // in the owner's address space
  uint64_t length = 0;
  uint64_t word = 0;    // of the key
  uint64_t mark = 0;    // on the owner's board while the key is good
  uint64_t life = 0;    // of the registration
  uint64_t access = 0;  // traits
  uint32_t slot = 0;
};

}  // namespace asyncfabric::local

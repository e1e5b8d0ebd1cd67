// op.h: one submitted transfer. Filled by the submitting thread, then owned by the engine lock until its completion was published.
// Its slot and its inner buffers are reused, so a warm engine does not allocate per op.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "asyncfabric/types.h"
#include "base/mailbox.h"
#include "engine/ops/box_list.h"
#include "engine/ops/page_list.h"
#include "engine/regions/region.h"

namespace asyncfabric {

struct Op;
struct Peer;

enum class OpKind : uint8_t {
  kWrite,
  kRead,
  kWritePages,
  kReadPages,
  kBoxes,
  kScatter,
  kSignal,
  kSend,
  kCounterCheck,  // no transfer: look at an armed counter under the engine lock
};

// The bytes of a leg's requests. A completion does not name the request that it ends, so while some are open or failed, what left is known as
// a lower bound: all requests but the newest have one length or more. It is exact once all succeeded.
struct SentBytes {
  uint64_t posted = 0;               // of all requests that the rail took
  uint64_t known = 0;                // left for certain; never shrinks
  uint64_t shortest = ~uint64_t{0};  // of all requests but the newest
  uint64_t newest = 0;
  uint64_t requests = 0;
  uint64_t failed = 0;

  void add(uint64_t length) {
    if (requests++ != 0) shortest = std::min(shortest, newest);
    newest = length;
    posted += length;
  }

  // Returns by how much `known` grew. `open`: requests that may still fail.
  uint64_t learn(uint64_t open) {
    const uint64_t lost = failed + open;
    const uint64_t done = requests > lost ? requests - lost : 0;
    const uint64_t least = lost == 0 ? posted : done == 0 ? 0 : (done - 1) * shortest + std::min(shortest, newest);
    const uint64_t before = std::exchange(known, std::max(known, least));
    return known - before;
  }
};

// The part of an op that goes over one lane to one target. A node of a rail's FIFO.
struct Leg {
  Leg* before = nullptr;
  Leg* after = nullptr;
  Op* op = nullptr;
  uint32_t target = 0;
  uint32_t lane = 0;
  uint64_t begin = 0;   // in bytes of the target's range, in pages, or in boxes
  uint64_t cursor = 0;  // next one to post
  uint64_t page_done =
      0;  // bytes of the page or box at the cursor that were posted: of one that is longer than a request
  uint64_t end = 0;
  uint32_t uncounted = 0;    // pages or boxes that were made into requests since the last immediate of this leg
  uint32_t outstanding = 0;  // signalled work requests that are posted
  SentBytes sent;
  bool queued = false;
  bool ended = false;
  bool counts_only = false;  // carries nothing but the immediate: cursor 0, end 1
  Leg* follower = nullptr;   // of another message that is posted in the request of this one, and ends with it
};

struct Target {
  KeyTable::Slot* key = nullptr;  // pinned
  PeerId peer_id = 0;             // named by the user (signal, send), otherwise from the key
  Peer* peer = nullptr;
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
  uint64_t length = 0;
  uint32_t legs_left = 0;
  bool fenced = false;  // several requests may overtake each other: the count goes out when all are delivered
  bool failed = false;
  bool stamped = false;  // `generation` is that of the counter when this was submitted
  uint32_t generation = 0;
};

struct Op : MailLink {
  explicit Op(uint32_t slot_number) : slot(slot_number) { cancel_link.op = this; }

  const uint32_t slot;
  std::atomic<uint32_t> next_free{0};
  std::atomic<uint32_t> generation{1};

  // Cancelling from any thread: the generation that is meant, then a node in the second mailbox.
  struct CancelLink : MailLink {
    Op* op = nullptr;
  } cancel_link;
  std::atomic<uint32_t> cancel_generation{0};
  std::atomic<uint32_t> cancel_queued{0};
  // Any thread. One that was held up since it looked at its op must not take the place of one that means a later use of the slot.
  void mean_to_cancel(uint32_t generation_meant) {
    uint32_t seen = cancel_generation.load(std::memory_order_seq_cst);
    while (static_cast<int32_t>(generation_meant - seen) > 0 &&
           !cancel_generation.compare_exchange_weak(seen, generation_meant, std::memory_order_seq_cst)) {}
  }

  OpKind kind = OpKind::kWrite;
  bool live = false;
  bool parked = false;
  bool cancelled = false;       // no more posting
  bool cut = false;             // cancelling really left something out
  bool revoked = false;         // its key was revoked under way: whatever does not come back is given up alone
  bool zombie = false;          // its completion was published, but the transport still owes events
  bool holds_closings = false;  // a peer waits for its end, to open its counter again
  int64_t imm = kNoImm;
  uint64_t cookie = 0;
  RegionTable::Slot* region = nullptr;  // pinned
  std::vector<Target> targets;
  PageList pages;
  uint64_t page_bytes = 0;
  BoxList boxes;
  std::unique_ptr<StreamMark> mark;  // a point in a stream of the user that must be passed before the first byte leaves
  std::vector<uint8_t> payload;      // of a message: room for a header, then its length and its bytes
  uint64_t sequence = 0;             // of a message, once it has its number
  std::vector<Leg> legs;
  uint32_t legs_left = 0;
  Status status;
  PeerId failed_peer = 0;
  uint64_t value = 0;  // of its completion: of kNotTaken how many messages ended together
  uint64_t rails = 0;
  uint64_t started_ns = 0;
  uint64_t drain_until_ns = 0;   // 0: not draining
  uint64_t resend_until_ns = 0;  // of a message that broke off once
  Op* live_before = nullptr;
  Op* live_after = nullptr;

  // Read by progress() from any thread; written under the engine lock. Relaxed: numbers for people.
  std::atomic<uint64_t> bytes_total{0};
  std::atomic<uint64_t> bytes_posted{0};
  std::atomic<uint64_t> bytes_done{0};  // left for certain, see SentBytes
  std::atomic<uint64_t> outstanding{0};
  std::atomic<uint64_t> peer_seen{0};

  // Counts one for each of its pages or boxes, many with one immediate where the rail is ordered.
  bool is_list() const { return has_pages() || kind == OpKind::kBoxes; }
  bool has_pages() const { return kind == OpKind::kWritePages || kind == OpKind::kReadPages; }
  bool reads() const { return kind == OpKind::kRead || kind == OpKind::kReadPages; }
  OpId id() const { return uint64_t{generation.load(std::memory_order_relaxed)} << 32 | (slot + 1); }
};

// FIFO of legs, intrusive so that a leg of a cancelled op leaves at once.
class LegQueue {
 public:
  bool empty() const { return first_ == nullptr; }
  Leg* front() const { return first_; }

  void push_back(Leg* leg) {
    leg->before = last_;
    leg->after = nullptr;
    (last_ != nullptr ? last_->after : first_) = leg;
    last_ = leg;
    leg->queued = true;
  }

  void remove(Leg* leg) {
    (leg->before != nullptr ? leg->before->after : first_) = leg->after;
    (leg->after != nullptr ? leg->after->before : last_) = leg->before;
    leg->before = leg->after = nullptr;
    leg->queued = false;
  }

 private:
  Leg* first_ = nullptr;
  Leg* last_ = nullptr;
};

}  // namespace asyncfabric

// bundle.h: user messages to one peer that wait behind each other leave in one request, since a request costs a rail more than the bytes
// of a short message. Nothing waits for company: what is queued when its lane is posted to goes together. Engine lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "engine/ops/op.h"
#include "engine/wire.h"
#include "provider/work.h"

namespace asyncfabric {

class BundleRoom {
 public:
  // Of one call of post(), which has read all of it when it returns.
  void clear() { used_ = 0; }

  // Adds to a request of `first` the messages behind it in its queue that have the next numbers, and chains their legs to it. Returns the
  // last leg whose message is in the request.
  Leg* gather(Leg& first, uint64_t most_bytes, WorkRequest& request) {
    const uint64_t room = std::min<uint64_t>(most_bytes, kBytes - used_);
    uint64_t length = request.length;
    Leg* last = &first;
    for (Leg* next = first.after; next != nullptr && follows(*next, *last); next = next->after) {
      const uint64_t more = next->op->payload.size() - kHeaderBytes;
      if (length + more > room) break;
      if (last == &first) std::memcpy(begin(), request.address, request.length);
      std::memcpy(begin() + length, next->op->payload.data() + kHeaderBytes, more);
      length += more;
      last->follower = next;
      last = next;
    }
    if (last == &first) return last;
    request.address = begin();
    request.length = length;
    used_ += length;
    return last;
  }

  // The request was not taken: each message is by itself again.
  static void let_go(Leg& first) {
    for (Leg* leg = &first; leg != nullptr;) leg = std::exchange(leg->follower, nullptr);
  }

 private:
  static constexpr uint64_t kBytes = 64 * 1024;

  static bool follows(const Leg& next, const Leg& last) {
    const Op& op = *next.op;
    const Op& before = *last.op;
    return op.kind == OpKind::kSend && op.sequence == before.sequence + 1 && next.lane == last.lane &&
           op.targets[next.target].peer == before.targets[last.target].peer;
  }
  uint8_t* begin() { return bytes_.get() + used_; }

  std::unique_ptr<uint8_t[]> bytes_ = std::make_unique<uint8_t[]>(kBytes);
  uint64_t used_ = 0;
};

}  // namespace asyncfabric

// lane.h: the sending end of one queue pair: a ring with one record per request that the device holds or that is not reported yet.
// RC completes a send queue in order, so one signalled completion ends every record before it, and a failed one proves the earlier
// ones good. Under the engine lock only.
#pragma once

#include <cstdint>
#include <vector>

#include "asyncfabric/status.h"
#include "providers/verbs/peers/queue_pair.h"

namespace asyncfabric::verbs {

constexpr uint32_t kNoSlot = ~0u;

struct Record {
  uint64_t tag = 0;
  uint32_t send_slot = kNoSlot;  // copy of a message, to give back
  uint32_t length = 0;
  bool kept = false;   // not reported: a message that goes out again over the next queue pair, or a question of our own
  bool quiet = false;  // the engine wants to learn of it only if it fails
};

enum class LaneState : uint8_t {
  kBuilding,  // the service thread has it: nothing is in the device
  kReady,
  kBroken,  // the device flushes what is left; then it is rebuilt
};

struct Lane {
  QueuePair pair;
  LaneState state = LaneState::kBuilding;
  uint8_t generation = 0;  // of the queue pair, so that completions of an earlier one are not taken for this one's
  std::vector<Record> ring;
  // Positions grow without end; a record's place is its position modulo the ring. head <= flushed <= tail:
  // [head, flushed) came back failed and waits for a verdict, [flushed, tail) is in the device.
  uint32_t head = 0;
  uint32_t flushed = 0;
  uint32_t tail = 0;
  Status broken;             // what the first failure reported
  bool awaits_peer = false;  // nobody knows whether the peer got it: held back until it is known whether the peer lives
  uint64_t verdict_until = 0;  // ... but no longer than this
  uint64_t received = 0;       // what had come back at the last look
  uint64_t silent_ns = 0;      // how long we looked and nothing came back of what is owed

  Record& at(uint32_t position) { return ring[position & (ring.size() - 1)]; }
  uint32_t in_device() const { return tail - flushed; }
  uint32_t unreported() const { return tail - head; }
  bool has_room() const { return state == LaneState::kReady && in_device() < pair.sizes.sends; }
};

}  // namespace asyncfabric::verbs

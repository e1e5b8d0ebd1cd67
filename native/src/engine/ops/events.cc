// events.cc: what rails report becomes counter values and completions. Under the engine lock.
#include <algorithm>
#include <array>
#include <utility>

#include "engine/core.h"

namespace asyncfabric {

size_t Core::poll(uint32_t rail_index) {
  std::array<RailEvent, 64> events;
  size_t total = 0;
  for (int pass = 0; pass < 4; ++pass) {
    const size_t count = rails[rail_index]->rail->poll(events);
    bool may_hide = count != 0 && !rails[rail_index]->capabilities.same_host_only && nics_write_to_gpus();
    for (size_t i = 0; i < count; ++i) {
      const RailEvent& event = events[i];
      switch (event.kind) {
        case RailEventKind::kDone: on_done(event.tag, event.status); break;
        case RailEventKind::kImmediate:  // flushed once, the first of a batch covers the others
          nic_writes_unseen = std::exchange(may_hide, false) || nic_writes_unseen;
          on_immediate(event.imm);
          break;
        case RailEventKind::kMessage:
          on_message({reinterpret_cast<const char*>(event.data), event.length}, {rail_index, event.connection});
          break;
        case RailEventKind::kPeerLost:
          for (const auto& peer : peers)
            for (const Lane& lane : peer->lanes)
              if (lane.handle.get() == event.peer && event.peer != nullptr)
                on_peer_lost(*peer, event.status.ok() ? Status(StatusCode::kPeerDead) : event.status);
          break;
        case RailEventKind::kRailDown: rail_down(rail_index, event.status); break;
        case RailEventKind::kRailUp:
          (void)note_address();  // its device may have been opened again
          rails[rail_index]->up.store(true, std::memory_order_relaxed);
          break;
        case RailEventKind::kPathDown: path_changed(event.peer, true); break;
        case RailEventKind::kPathUp: path_changed(event.peer, false); break;
      }
    }
    total += count;
    if (count < events.size()) break;
  }
  return total;
}

bool Core::nics_write_to_gpus() const {
  return std::any_of(rails.begin(), rails.end(),
                     [](const auto& rail) { return rail->nic_regions.load(std::memory_order_acquire) != 0; });
}

// An immediate means that its bytes crossed the bus; a GPU that does not order what NICs write may show its kernels older ones. The
// processor never looks at that memory, and a kernel that is launched later sees it: so only flags wait for this.
Status Core::flush_nic_writes() {
  for (const auto& rail : rails) {
    if (rail->nic_regions.load(std::memory_order_acquire) == 0) continue;  // the others may be no rails of GPUs
    if (const Status status = rail->rail->gpu()->flush_nic_writes(); !status.ok()) {
      note_error("what NICs wrote to memory of " + rail->rail->info().device +
                 " could not be made visible to its kernels: counters do not release them");
      return status;
    }
  }
  return {};
}

void Core::on_immediate(uint32_t imm32) {
  tallies.immediates_received.add(1);
  trace.point(TracePoint::kArrival, imm_of(imm32), worth_of(imm32));
  const CounterArrival arrival = counters.arrive(imm32, &nic_writes_unseen);
  if (arrival.stale) tallies.stale_arrivals.add(worth_of(imm32));
  if (arrival.early) tallies.early_arrivals.add(worth_of(imm32));
  if (arrival.reached) publish({.cookie = arrival.cookie, .kind = CompletionKind::kCounter, .value = arrival.value});
}

void Core::on_done(uint64_t tag, Status status) {
  if (tag == 0) return;  // an engine message; whoever needs an answer asks again
  const uint32_t slot = tag >> 24 & 0xfffff;
  if (!ops.exists(slot)) return;
  Op& op = ops[slot];
  const uint32_t index = tag >> 1 & 0x7fffff;
  if ((op.generation.load(std::memory_order_relaxed) & 0xfffff) != tag >> 44 || index >= op.legs.size()) return;
  for (Leg* leg = &op.legs[index]; leg != nullptr;) {
    Leg* follower = std::exchange(leg->follower, nullptr);  // its op lives as long as it is outstanding
    request_ended(*leg, status, (tag & 1) != 0);
    leg = follower;
  }
}

void Core::request_ended(Leg& leg, Status status, bool signalled) {
  Op& op = *leg.op;
  if (!status.ok()) ++leg.sent.failed;
  if (signalled) {
    --leg.outstanding;
    op.outstanding.store(op.outstanding.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
    --op.targets[leg.target].peer->outstanding;
  }
  if (op.zombie) {  // its wait ended long ago; now its memory is free too
    if (op.outstanding.load(std::memory_order_relaxed) == 0) retire(op);
    return;
  }
  Peer& peer = *op.targets[leg.target].peer;
  if (const uint64_t more = leg.sent.learn(leg.outstanding); more != 0)
    op.bytes_done.store(op.bytes_done.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
  if (status.ok())
    peer.received = true;  // it answers, even if its answers to heartbeats stand in a long queue
  else if (!send_again(op, leg, status))
    fail_target(op, leg.target, status);
  if (leg.queued && leg.outstanding == 0 && peer.lanes[leg.lane].down) go_round(leg);
  if (leg.cursor == leg.end && leg.outstanding == 0 && !leg.queued) leg_ended(leg);
  // The transport reports that nobody is there: the others of this peer need not find out one by one.
  if (status.kind == StatusKind::kPeer) lose_peer(peer, status, PeerState::kLost);
}

void Core::leg_ended(Leg& leg) {
  if (leg.ended) return;
  leg.ended = true;
  Op& op = *leg.op;
  Target& target = op.targets[leg.target];
  --op.legs_left;
  if (--target.legs_left == 0 && target.fenced && !target.failed && !leg.counts_only) {
    if (op.cancelled)
      op.cut = true;
    else
      count_fenced(op, leg);
  }
  if (op.legs_left == 0) finish(op);
}

// Every byte is visible at the target: now the whole may be counted, over any lane. The one of the last part may have gone down since.
void Core::count_fenced(Op& op, const Leg& last) {
  const uint32_t target = last.target;
  const Peer& peer = *op.targets[target].peer;
  uint32_t lane = last.lane;
  if (!usable(peer.lanes[lane]))
    if (const uint32_t other = way_round(peer, lane); other < peer.lanes.size()) lane = other;
  if (open(peer.lanes[lane]))
    enqueue(op, target, lane, 0, 1, true);
  else
    fail_target(op, target, StatusCode::kRailDown);
}

// Publishes the op's completion. Its slot goes back unless the transport still owes events (a zombie).
void Core::finish(Op& op) {
  if (op.status.ok() && op.cut) op.status = StatusCode::kCancelled;
  uint64_t bytes = op.bytes_posted.load(std::memory_order_relaxed);
  if (!op.status.ok()) {
    bytes = 0;
    for (Leg& leg : op.legs) {
      leg.sent.learn(leg.outstanding);
      bytes += leg.sent.known;
    }
  }
  Completion completion;
  completion.cookie = op.cookie;
  completion.kind = CompletionKind::kOp;
  completion.status = op.status;
  completion.value = op.value;
  completion.bytes = bytes;
  completion.duration_ns = now_ns() - op.started_ns;
  completion.rails = op.rails;
  completion.peer = op.failed_peer;
  if (op.status.code == StatusCode::kCancelled)
    tallies.ops_cancelled.add(1);
  else if (!op.status.ok())
    tallies.ops_failed.add(1);
  trace.point(TracePoint::kFinish, op.cookie, completion.bytes);
  publish(completion);
  if (op.drain_until_ns != 0) --draining;
  op.drain_until_ns = op.resend_until_ns = 0;
  if (op.outstanding.load(std::memory_order_relaxed) == 0) retire(op);
  tallies.ops_completed.add(1);  // last: who sees this number finds the slot free
}

void Core::retire(Op& op) {
  if (op.holds_closings) release_closings(op);
  if (op.live) {
    (op.live_before != nullptr ? op.live_before->live_after : live_first) = op.live_after;
    if (op.live_after != nullptr) op.live_after->live_before = op.live_before;
    --live_count;
  }
  if (op.region != nullptr) {
    if (op.zombie) {
      const std::lock_guard lock(keys_mutex);
      --op.region->value.zombies;
    }
    unpin_region(op.region);
  }
  for (Target& target : op.targets) {
    if (target.peer != nullptr) target.peer->ops_in_flight.fetch_sub(1, std::memory_order_relaxed);
    if (target.key != nullptr) unpin_key(target.key);
  }
  op.region = nullptr;
  op.targets.clear();
  op.legs.clear();
  op.pages.clear();
  op.boxes.clear();
  op.payload.clear();
  op.live = op.parked = op.cancelled = op.cut = op.revoked = op.zombie = false;
  op.legs_left = 0;
  op.status = {};
  op.failed_peer = 0;
  op.value = 0;
  op.rails = 0;
  op.outstanding.store(0, std::memory_order_relaxed);
  // From here a handle or a tag of this op is refused.
  op.generation.fetch_add(1, std::memory_order_acq_rel);
  ops.give_back(&op);
}

}  // namespace asyncfabric

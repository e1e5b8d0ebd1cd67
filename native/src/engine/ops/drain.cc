// drain.cc: how work ends early: cancelling, failing, a rail that went down, closing. Under the engine lock.
// INV-2: an op's completion is published only when none of its work requests is outstanding, or its region is quarantined.
#include "engine/core.h"

namespace asyncfabric {

void Core::drop_leg(Leg& leg) {
  if (leg.queued) {
    queue_of(leg).remove(&leg);
    if (leg.cursor != leg.end) leg.op->cut = true;
  }
  leg.cursor = leg.end;
  leg.page_done = 0;
}

void Core::fail_target(Op& op, uint32_t index, Status status) {
  Target& target = op.targets[index];
  if (op.status.ok()) {
    op.status = status;
    op.failed_peer = target.peer != nullptr ? target.peer->id : 0;
  }
  if (target.failed || op.zombie) return;
  target.failed = true;
  // The other targets of a scatter go on: one bad peer harms its own part alone.
  const uint32_t generation = op.generation.load(std::memory_order_relaxed);
  for (size_t i = 0; i < op.legs.size(); ++i) {
    Leg& leg = op.legs[i];
    if (leg.target != index) continue;
    const bool was_queued = leg.queued;
    drop_leg(leg);
    if (was_queued && leg.outstanding == 0) {
      leg_ended(leg);
      if (op.generation.load(std::memory_order_relaxed) != generation) return;  // that was the last leg: the op is gone
    }
  }
}

// Ends an op that has no legs yet.
void Core::fail_op(Op& op, Status status, PeerId peer) {
  if (op.status.ok()) op.status = status;
  op.failed_peer = peer;
  op.parked = false;
  if (op.mark) {
    std::erase(marked, &op);
    op.mark.reset();
  }
  finish(op);
}

void Core::cancel(Op& op) {
  if (!op.live || op.cancelled || op.zombie) return;
  op.cancelled = true;
  if (op.parked) {
    for (Target& target : op.targets)
      if (target.peer != nullptr) {
        std::erase(target.peer->parked, &op);
        std::erase(target.peer->waiting_for_credit, &op);
      }
    fail_op(op, StatusCode::kCancelled, 0);
    return;
  }
  const uint32_t generation = op.generation.load(std::memory_order_relaxed);
  for (size_t i = 0; i < op.legs.size(); ++i) {
    Leg& leg = op.legs[i];
    // A message that took its sequence number has to arrive, or the receiver would wait for it for ever.
    if (!leg.queued || op.kind == OpKind::kSend) continue;
    drop_leg(leg);
    if (leg.outstanding != 0) continue;
    leg_ended(leg);
    if (op.generation.load(std::memory_order_relaxed) != generation) return;
  }
  start_draining(op);
}

void Core::start_draining(Op& op) {
  if (op.drain_until_ns != 0) return;
  op.drain_until_ns = now_ns() + config.drain_deadline_ns;
  ++draining;
  next_tick_ns = 0;
}

// The deadline passed: whoever does not answer is disconnected, and only then does the op end.
void Core::drain_expired(Op& op) {
  if (op.revoked) {  // a transport that swallows requests for dead keys: no reason to take the whole peer along
    quarantine(op);
    return;
  }
  const uint32_t generation = op.generation.load(std::memory_order_relaxed);
  for (size_t i = 0; i < op.targets.size(); ++i) {
    Peer* peer = op.targets[i].peer;
    if (peer != nullptr && (peer->state == PeerState::kConnected || peer->state == PeerState::kConnecting)) {
      give_up(*peer, StatusCode::kPeerDead, PeerState::kLost);
      if (op.generation.load(std::memory_order_relaxed) != generation || op.zombie) return;
    }
  }
  // Rails that flush report the rest with their next poll.
  for (uint32_t rail = 0; rail < rails.size(); ++rail) poll(rail);
  if (op.generation.load(std::memory_order_relaxed) != generation) return;
  if (op.outstanding.load(std::memory_order_relaxed) != 0) quarantine(op);
}

// The transport gives no promise: end the wait, keep the memory pinned for good (or until the events come after all).
void Core::quarantine(Op& op) {
  for (Leg& leg : op.legs)
    if (leg.queued) drop_leg(leg);
  op.zombie = true;
  op.status = op.revoked ? StatusCode::kStaleKey : StatusCode::kDrainTimeout;
  if (op.region != nullptr) {
    tallies.quarantined.add(1);
    const uint64_t handle = op.region->handle;
    const std::lock_guard lock(keys_mutex);
    ++op.region->value.zombies;
    if (const auto waiting = releases.find(handle); waiting != releases.end()) {
      publish({.cookie = waiting->second,
               .kind = CompletionKind::kControl,
               .status = StatusCode::kDrainTimeout,
               .value = handle});
      releases.erase(waiting);
    }
  }
  finish(op);
}

// Another lane to the peer that carries now, and for a leg of data its memory; lanes.size(): there is none.
uint32_t Core::way_round(const Peer& peer, uint32_t avoided, const Leg* data) const {
  for (uint32_t lane = 0; lane < peer.lanes.size(); ++lane) {
    if (lane == avoided || !usable(peer.lanes[lane])) continue;
    if (data == nullptr || carries(*data->op, data->op->targets[data->target], peer.lanes[lane])) return lane;
  }
  return static_cast<uint32_t>(peer.lanes.size());
}

// What is left of a queued leg goes over another lane, if there is one. While a part of counted work is posted it stays: the rail reports what
// became of that part, and it goes (or fails) then.
void Core::go_round(Leg& leg) {
  const Op& op = *leg.op;
  if (op.imm != kNoImm && leg.outstanding != 0) return;
  const Peer& peer = *op.targets[leg.target].peer;
  const uint32_t other = way_round(peer, leg.lane, &leg);
  if (other == peer.lanes.size()) return;
  queue_of(leg).remove(&leg);
  leg.lane = other;
  leg.page_done = 0;  // a page that was begun goes whole over the other lane
  queue_of(leg).push_back(&leg);
}

void Core::path_changed(const RailPeer* path, bool down) {
  for (const auto& peer : peers)
    for (uint32_t index = 0; index < peer->lanes.size(); ++index) {
      Lane& lane = peer->lanes[index];
      if (path == nullptr || lane.handle.get() != path) continue;
      lane.down = down;
      if (!down) continue;
      for (LegQueue* queue : {&rails[lane.rail]->urgent, &rails[lane.rail]->bulk})
        for (Leg* leg = queue->front(); leg != nullptr;) {
          Leg* after = leg->after;
          if (leg->lane == index && leg->op->targets[leg->target].peer == peer.get()) go_round(*leg);
          leg = after;
        }
    }
}

void Core::rail_down(uint32_t down, Status status) {
  RailState& rail = *rails[down];
  rail.up.store(false, std::memory_order_relaxed);
  if (status.ok()) status = StatusCode::kRailDown;
  for (LegQueue* queue : {&rail.urgent, &rail.bulk})
    while (Leg* leg = queue->front()) {
      Op& op = *leg->op;
      const Peer& peer = *op.targets[leg->target].peer;
      // Counted work that is partly posted is ambiguous: its parts were to be counted together on this lane. It fails by name.
      const bool movable = op.imm == kNoImm || leg->cursor == leg->begin;
      const uint32_t lane = way_round(peer, leg->lane, leg);
      if (!movable || lane == peer.lanes.size()) {
        fail_target(op, leg->target, status);  // takes all its legs out of the queues
        continue;
      }
      queue->remove(leg);
      leg->lane = lane;
      leg->page_done = 0;
      queue_of(*leg).push_back(leg);
    }
}

void Core::begin_close(uint64_t cookie, bool cancel_unposted) {
  close_cookie = cookie;
  close_pending = true;
  close_until_ns = now_ns() + config.drain_deadline_ns;
  if (cancel_unposted) hurry_close();
  next_tick_ns = 0;
}

// With the next tick, since the mailbox may hold what was submitted before; by then it is taken up.
void Core::hurry_close() {
  close_hurries = true;
  next_tick_ns = 0;
}

// Ends what waits for somebody else before its first byte: for room at a peer whose program takes no messages, a peer that is not
// connected, a mark that nobody reaches. What has begun to leave goes on: the deadlines of its peers bound it, and it may be large.
void Core::end_waiting() {
  for (const auto& peer : peers) end_untaken(*peer);
  cancel_where([](const Op& op) { return op.parked; });
}

void Core::advance_close(uint64_t now) {
  if (close_hurries) cancel_where([](const Op&) { return true; });
  if (live_count != 0 && now >= close_until_ns) {
    close_until_ns = ~0ull;
    end_waiting();
  }
  for (const Op* op = live_first; op != nullptr; op = op->live_after)
    if (!op->zombie) return;
  for (const auto& peer : peers)
    if (peer->state == PeerState::kConnected) send_message(*peer, 0, MessageType::kBye, 0, {});
  flush_outgoing();
  close_pending = false;
  publish({.cookie = close_cookie, .kind = CompletionKind::kClosed});
}

}  // namespace asyncfabric

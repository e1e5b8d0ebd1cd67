// start.cc: turns a submitted op into legs on rail queues. Under the engine lock.
#include <algorithm>
#include <array>

#include "engine/core.h"
#include "engine/ops/striping.h"

namespace asyncfabric {

namespace {

bool names_peer(const Op& op) { return op.kind == OpKind::kSignal || op.kind == OpKind::kSend; }

}  // namespace

void Core::start(Op& op) {
  if (op.kind == OpKind::kCounterCheck) {
    const CounterArrival arrival = counters.check_armed(static_cast<uint32_t>(op.imm));
    if (arrival.reached) publish({.cookie = arrival.cookie, .kind = CompletionKind::kCounter, .value = arrival.value});
    retire(op);
    return;
  }
  if (!op.live) {
    op.live = true;
    op.live_before = nullptr;
    op.live_after = live_first;
    if (live_first != nullptr) live_first->live_before = &op;
    live_first = &op;
    ++live_count;
    trace.point(TracePoint::kStart, op.cookie, op.bytes_total.load(std::memory_order_relaxed));
    stamp(op);
  }
  op.parked = false;
  if (op.mark) {
    const Status passed = op.mark->passed();
    if (passed.code == StatusCode::kBusy) {
      op.parked = true;
      marked.push_back(&op);
      return;
    }
    op.mark.reset();
    if (!passed.ok()) {
      fail_op(op, passed, 0);
      return;
    }
  }
  // All targets must be ready before the first byte leaves: a parked op that is cancelled has sent nothing.
  for (Target& target : op.targets) {
    if (target.peer == nullptr) {
      target.peer = names_peer(op) ? to_use(find_peer(target.peer_id)) : peer_for_key(target.key->value);
      if (target.peer == nullptr) {
        fail_op(op, StatusCode::kPeerDead, target.peer_id);
        return;
      }
      target.peer->ops_in_flight.fetch_add(1, std::memory_order_relaxed);
      op.peer_seen.store(target.peer->id, std::memory_order_relaxed);
    }
    Peer& peer = *target.peer;
    if (peer.ended()) {
      fail_op(op, peer.lost_because.ok() ? Status(StatusCode::kPeerDead) : peer.lost_because, peer.id);
      return;
    }
    if (peer.state == PeerState::kConnecting) {
      activate(peer);
      op.parked = true;
      peer.parked.push_back(&op);
      return;
    }
    if (op.imm != kNoImm && peer.knows_a_part()) {
      op.parked = true;
      peer.parked.push_back(&op);
      return;
    }
    if (target.key != nullptr && target.key->value.stale) {
      fail_op(op, StatusCode::kStaleKey, peer.id);
      return;
    }
    if (target.key != nullptr && target.key->value.attach != AttachState::kAttached) {
      if (target.key->value.attach == AttachState::kNone) ask_key(*target.key, peer);
      op.parked = true;
      peer.parked.push_back(&op);
      return;
    }
    if (op.kind == OpKind::kSend && op.legs.empty()) {
      if (peer.credits() == 0) {
        op.parked = true;
        peer.waiting_for_credit.push_back(&op);
        if (peer.waiting_for_credit.size() == 1) ask_credit(peer);
        return;
      }
      op.sequence = peer.next_sequence++;
      MessageHeader header{MessageType::kUser, incarnation, peer.incarnation, op.sequence, peer.their_life};
      encode_header(header, reinterpret_cast<char*>(op.payload.data()));
    }
  }
  stamp(op);
  plan(op);
}

// Looked at by the host and not left to the GPU: what waits has sent nothing, can be cancelled, and holds up nobody behind it.
size_t Core::start_marked() {
  size_t started = 0;
  for (size_t i = 0; i < marked.size();) {
    Op& op = *marked[i];
    if (op.mark->passed().code == StatusCode::kBusy) {
      ++i;
      continue;
    }
    marked.erase(marked.begin() + static_cast<ptrdiff_t>(i));  // in order: writes after one stream leave as they came
    start(op);
    ++started;
  }
  return started;
}

void Core::restart_parked(Peer& peer) {
  std::vector<Op*> parked;
  parked.swap(peer.parked);
  for (Op* op : parked) start(*op);
}

void Core::enqueue(Op& op, uint32_t target, uint32_t lane, uint64_t begin, uint64_t end, bool counts_only) {
  Leg& leg = op.legs.emplace_back();
  leg.op = &op;
  leg.target = target;
  leg.lane = lane;
  leg.begin = leg.cursor = begin;
  leg.end = end;
  leg.counts_only = counts_only;
  ++op.legs_left;
  ++op.targets[target].legs_left;
  queue_of(leg).push_back(&leg);
}

LegQueue& Core::queue_of(const Leg& leg) {
  RailState& rail = *rails[leg.op->targets[leg.target].peer->lanes[leg.lane].rail];
  return leg.counts_only || leg.op->kind == OpKind::kSend ? rail.urgent : rail.bulk;
}

void Core::plan(Op& op) {
  // Legs are linked by address: room for all of them, and for one counting leg per target, before the first is made.
  size_t most = 0;
  for (const Target& target : op.targets) most += target.peer->lanes.size() + 1;
  op.legs.reserve(most);

  std::array<Stripe, kMaxLanes> stripes;
  std::array<double, kMaxLanes> weights;
  std::array<uint32_t, kMaxLanes> lanes;
  const uint32_t generation = op.generation.load(std::memory_order_relaxed);
  for (uint32_t index = 0; index < op.targets.size(); ++index) {
    Target& target = op.targets[index];
    Peer& peer = *target.peer;
    size_t usable_lanes = 0;
    // A lane is there, but its rails do not know the memory, or cannot do what is asked.
    bool unknown = false, incapable = false;
    // Lanes that are down serve when there is no other: their rails let work wait.
    const bool any_usable = std::any_of(peer.lanes.begin(), peer.lanes.end(),
                                        [&](const Lane& l) { return usable(l) && carries(op, target, l); });
    for (uint32_t lane = 0; lane < peer.lanes.size() && usable_lanes < kMaxLanes; ++lane) {
      if (any_usable ? !usable(peer.lanes[lane]) : !open(peer.lanes[lane])) continue;
      if (!carries(op, target, peer.lanes[lane])) {
        unknown = true;
        continue;
      }
      const Capabilities& can = rails[peer.lanes[lane].rail]->capabilities;
      if ((op.reads() && !can.read) || (op.kind == OpKind::kBoxes && !can.gathers)) {
        incapable = true;
        continue;
      }
      weights[usable_lanes] = peer.weights[lane];
      lanes[usable_lanes++] = lane;
    }
    if (usable_lanes == 0) {
      if (unknown) note_no_rail(op, target);
      const bool unsupported = op.reads() || unknown || incapable;
      if (op.status.ok()) op.status = unsupported ? StatusCode::kUnsupported : StatusCode::kRailDown;
      op.failed_peer = peer.id;
      target.failed = true;
      continue;
    }
    const size_t first = peer.next_lane++ % usable_lanes;
    if (op.kind == OpKind::kSend) {
      enqueue(op, index, lanes[0], 0, 1, false);
      continue;
    }
    const bool pages = op.is_list();
    const uint64_t total = op.has_pages()              ? op.pages.size()
                           : op.kind == OpKind::kBoxes ? op.boxes.size()
                                                       : target.length;
    if (total == 0) {
      if (op.imm != kNoImm && !pages) enqueue(op, index, lanes[first], 0, 1, true);
      continue;
    }
    uint64_t minimum = std::max<uint64_t>(1, config.stripe_bytes);
    if (op.has_pages()) minimum = std::max<uint64_t>(1, config.stripe_bytes / std::max<uint64_t>(op.page_bytes, 1));
    if (op.kind == OpKind::kBoxes) minimum = total;  // copied one behind the other
    const size_t parts = plan_stripes(total, {weights.data(), usable_lanes}, first, minimum, pages ? 1 : 4096, stripes);
    if (!pages && op.imm != kNoImm) {
      const Capabilities& rail = rails[peer.lanes[lanes[stripes[0].lane]].rail]->capabilities;
      target.fenced = parts > 1 || (!rail.ordered && total > rail.max_request_bytes);
    }
    for (size_t i = 0; i < parts; ++i)
      enqueue(op, index, lanes[stripes[i].lane], stripes[i].begin, stripes[i].end, false);
  }
  if (op.legs_left == 0 && op.generation.load(std::memory_order_relaxed) == generation) finish(op);
}

}  // namespace asyncfabric

// peers.cc: the list of peers, their liveness and their end. Under the engine lock.
#include <algorithm>
#include <utility>

#include "engine/core.h"

namespace asyncfabric {

Peer& Core::make_peer(uint64_t peer_incarnation, std::string peer_address) {
  Peer& peer = peers.add();
  peer.incarnation = peer_incarnation;
  peer.address = std::move(peer_address);
  peer.connect_until_ns = now_ns() + config.connect_deadline_ns;
  peer_of_incarnation[peer_incarnation] = &peer;
  trace.point(TracePoint::kPeer, peer.id, static_cast<uint64_t>(peer.state));
  return peer;
}

Peer* Core::peer_for_key(RemoteKey& key) {
  if (key.peer != nullptr && !key.peer->ended()) return key.peer;
  const auto known = peer_of_incarnation.find(key.incarnation);
  Peer* peer = known != peer_of_incarnation.end() ? to_use(known->second) : nullptr;
  // A key that came after the loss shows that its owner lives: each such key is one try to connect.
  if (peer == nullptr || (peer->ended() && key.opened_ns > peer->lost_ns))
    peer = &make_peer(key.incarnation, key.address);
  if (key.peer != peer) {
    key.peer = peer;
    key.lanes.clear();
    key.attach = AttachState::kNone;
  }
  return peer;
}

// A lost incarnation stays lost until the user connects again or uses a new key of it: using it fails at once. One that this fabric
// disconnected gets a new entry, so that nothing of the ended connection counts for the new one; the id of the old entry goes on to name it.
Peer* Core::to_use(Peer* named) {
  if (named == nullptr || !named->disconnected_here()) return named;
  const auto known = peer_of_incarnation.find(named->incarnation);
  Peer* latest = known != peer_of_incarnation.end() ? known->second : named;
  return latest->disconnected_here() ? &make_peer(latest->incarnation, latest->address) : latest;
}

void Core::connect(Peer& peer) {
  if (peer.wiring || peer.wired) return;
  peer.wiring = true;
  next_tick_ns = 0;
  const auto wire = [this, id = peer.id] { wire_peer(id); };
  if (peer.active)
    control.post(wire);
  else
    control.post_behind(wire);
}

void Core::activate(Peer& peer) {
  if (peer.active) return;
  peer.active = true;
  peer.connect_until_ns = now_ns() + config.connect_deadline_ns;
  next_tick_ns = 0;
  if (peer.wired) return send_hello(peer);
  peer.wiring = false;  // the job may stand among those of strangers
  connect(peer);
}

void Core::connect_to(uint64_t cookie, const AddressBlob& blob, const std::string& bytes) {
  const auto known = peer_of_incarnation.find(blob.incarnation);
  Peer* peer = known == peer_of_incarnation.end() ? nullptr : known->second;
  // Asking again after a loss is a new try with a new entry; what failed with the old one stays failed.
  if (peer == nullptr || peer->ended()) peer = &make_peer(blob.incarnation, bytes);
  if (peer->state == PeerState::kConnected) {
    publish({.cookie = cookie, .kind = CompletionKind::kControl, .value = peer->id});
    return;
  }
  peer->connect_cookies.push_back(cookie);
  activate(*peer);
}

void Core::connected(Peer& peer) {
  if (peer.state != PeerState::kConnecting) return;
  peer.state = PeerState::kConnected;
  peer.received = true;
  peer.was_connected = true;
  peer.next_ping_ns = 0;
  next_tick_ns = 0;
  trace.point(TracePoint::kPeer, peer.id, static_cast<uint64_t>(peer.state));
  for (const uint64_t cookie : peer.connect_cookies)
    publish({.cookie = cookie, .kind = CompletionKind::kControl, .value = peer.id});
  peer.connect_cookies.clear();
  // What was left unsent while we met leaves before anything that is posted from here on.
  if (peer.active && !peer.reports_loss)
    send_message(peer, 0, MessageType::kPing, 0, {});  // it sees that we got its answer
  peer.next_reminder_ns = 1;
  (void)remind(peer, now_ns());
  ask_closings(peer);
  restart_parked(peer);
}

void Core::connect_failed(Peer& peer, Status status) { lose_peer(peer, status, PeerState::kLost); }

void Core::on_peer_lost(Peer& peer, Status status) {
  if (peer.state == PeerState::kConnecting && status.code == StatusCode::kPeerDead) {
    status = StatusCode::kPeerUnreachable;
    note_error("nobody listens at its address over " + peer.protocol + " any more");
  }
  lose_peer(peer, status, PeerState::kLost);
}

void Core::lose_peer(Peer& peer, Status status, PeerState state) {
  if (peer.ended()) return;
  const bool was_connected = peer.state == PeerState::kConnected;
  peer.state = state;
  peer.lost_because = status;
  peer.lost_ns = now_ns();
  trace.point(TracePoint::kPeer, peer.id, static_cast<uint64_t>(state));
  for (const uint64_t cookie : peer.connect_cookies)
    publish({.cookie = cookie, .kind = CompletionKind::kControl, .status = status, .peer = peer.id});
  peer.connect_cookies.clear();
  // Flush first: the events of what was posted come with the next poll and end the ops.
  for (Lane& lane : peer.lanes) {
    if (lane.handle && !lane.closed) rails[lane.rail]->rail->disconnect(*lane.handle);
    lane.closed = true;
  }
  admission.take_back(peer);
  wants_credit(peer, false);
  forget_closings(peer);
  for (Op* op = live_first; op != nullptr;) {
    Op* after = op->live_after;
    if (!op->zombie) {
      const uint32_t generation = op->generation.load(std::memory_order_relaxed);
      if (op->parked) {
        const bool waits_here = std::erase(peer.parked, op) + std::erase(peer.waiting_for_credit, op) != 0;
        if (waits_here) fail_op(*op, status, peer.id);
      } else {
        for (uint32_t i = 0; i < op->targets.size(); ++i) {
          if (op->targets[i].peer != &peer) continue;
          fail_target(*op, i, status);
          if (op->generation.load(std::memory_order_relaxed) != generation) break;
        }
        if (op->generation.load(std::memory_order_relaxed) == generation &&
            op->outstanding.load(std::memory_order_relaxed) != 0)
          start_draining(*op);
      }
    }
    op = after;
  }
  keys.for_each([&](KeyTable::Slot& slot) {
    RemoteKey& key = slot.value;
    if (key.peer != &peer) return;
    for (auto& attached : key.lanes) peer.graveyard.push_back(std::move(attached));
    key.lanes.clear();
    key.attach = AttachState::kNone;
  });
  next_tick_ns = 0;
  if (was_connected || state == PeerState::kLost)
    publish({.kind = CompletionKind::kPeerLost, .status = status, .value = peer.id, .peer = peer.id});
}

// We lose it, and it may live: a process that was stopped goes on some day, and does not know of counters that were opened meanwhile. So
// its connections to us are shut before its loss confirms anything (INV-1).
void Core::give_up(Peer& peer, Status status, PeerState state) {
  if (peer.ended()) return;
  for (const auto& [rail, connection] : peer.inbound) rails[rail]->rail->shut_out(connection);
  lose_peer(peer, status, state);
}

// Frees what a lost peer held once nothing of it is in flight. True: it holds nothing any more. The entry itself stays for a while, small,
// so that what is meant for it stays refused.
bool Core::reap(Peer& peer) {
  if (peer.outstanding != 0 || peer.visitors != 0 || peer.ops_in_flight.load(std::memory_order_relaxed) != 0)
    return false;
  peer.graveyard.clear();
  peer.lanes.clear();
  peer.inbound.clear();
  peer.wired = false;
  note_asynchronous(peer, false);
  peer.asking.clear();
  peer.out_of_order.clear();
  peer.counter_generations = {};
  return true;
}

// The loop has the rails only while nobody needs the worker's cycles.
void Core::note_asynchronous(Peer& peer, bool asynchronous) {
  if (std::exchange(peer.asynchronous, asynchronous) == asynchronous) return;
  const uint32_t before = asynchronous_peers.load(std::memory_order_relaxed);
  const uint32_t now = asynchronous ? before + 1 : before - 1;
  asynchronous_peers.store(now, std::memory_order_relaxed);
  if (!can_hand_over || (before == 0) == (now == 0)) return;
  std::vector<int> fds;
  for (const auto& rail : rails) fds.push_back(rail->rail->wait_fd());
  rail_watch.lend(fds, now == 0);
  gate.notify();  // the worker looks again at who has the rails
}

void Core::forget(const Peer& peer) {
  for (const Inbound& way : peer.inbound)
    if (admission.owner(way) == 0) rails[way.first]->rail->dismiss(way.second);
  keys.for_each([&](KeyTable::Slot& slot) {
    if (slot.value.peer == &peer) slot.value.peer = nullptr;
  });
  const auto known = peer_of_incarnation.find(peer.incarnation);
  if (known != peer_of_incarnation.end() && known->second == &peer) peer_of_incarnation.erase(known);
}

// Heartbeats: always where the rails do not report a death, and while ops are in flight everywhere, because a process that is
// stopped is not dead and answers nothing. Silence is what we looked at: a process that was itself stopped, throttled or moved finds old
// clocks and empty queues when it goes on, and must not take its own absence for the death of all its peers. Returns when to look again.
uint64_t Core::check_pulse(Peer& peer, uint64_t now) {
  const bool owes = peer.ops_in_flight.load(std::memory_order_relaxed) != 0 || !peer.closings_asked.empty();
  if ((peer.reports_loss && !owes) || peer.incarnation == incarnation || config.polling == PollingMode::kManual) {
    peer.looked_ns = 0;
    return ~0ull;
  }
  const uint64_t deadline = peer.same_host ? config.peer_deadline_host_ns : config.peer_deadline_network_ns;
  if (peer.looked_ns == 0) {  // silence before our first ping means nothing
    peer.received = true;
    peer.next_ping_ns = 0;
  }
  // A peer that connected to us gets our welcome and our pings when our own connection to it stands, which may take as long as set-up
  // may take.
  if (!peer.met && now < peer.connect_until_ns) peer.received = true;
  const uint64_t gap = now - std::exchange(peer.looked_ns, now);
  peer.silent_ns = std::exchange(peer.received, false) ? 0 : peer.silent_ns + std::min(gap, deadline / 4);
  if (peer.silent_ns > deadline) {
    give_up(peer, StatusCode::kPeerDead, PeerState::kLost);
    return ~0ull;
  }
  if (now >= peer.next_ping_ns) {
    // Over each lane in turn, answered over the same one: a lane that swallows everything must not make a living peer dead.
    const uint32_t lane = peer.next_pulse++ % static_cast<uint32_t>(peer.lanes.size());
    send_message(peer, lane, MessageType::kPing, lane, {});
    peer.next_ping_ns = now + deadline / 5;
  }
  return peer.next_ping_ns;
}

void Core::tick(uint64_t now) {
  constexpr uint64_t kSoon = 1'000'000;
  uint64_t next = ~0ull;
  bool any_rests = false;
  for (size_t i = 0; i < peers.awake(); ++i) {
    Peer& peer = peers[i];
    switch (peer.state) {
      case PeerState::kConnecting:
        if (now >= peer.connect_until_ns) {
          note_error("the peer did not answer over " + (peer.protocol.empty() ? "any rail" : peer.protocol) +
                     " within " + std::to_string(config.connect_deadline_ns / 1'000'000) + " ms" + no_descriptor());
          give_up(peer, StatusCode::kPeerUnreachable, PeerState::kLost);
        } else {
          next = std::min(next, peer.connect_until_ns);
          if (!peer.wired || !peer.active) break;  // wired() and activate() have us look again
          if (now >= peer.next_hello_ns) send_hello(peer);
          next = std::min(next, peer.next_hello_ns);
        }
        break;
      case PeerState::kConnected:
        if (!peer.asking.empty()) {
          ask_again(peer, now);
          next = std::min(next, peer.next_ask_ns);
        }
        next = std::min(next, remind(peer, now));
        next = std::min(next, check_pulse(peer, now));
        break;
      case PeerState::kLost:
      case PeerState::kDisconnected:
        if (reap(peer))
          any_rests = true;
        else
          next = std::min(next, now + kSoon * 10);
        break;
    }
  }
  if (any_rests)
    peers.lay_down([this](Peer& peer) { return peer.ended() && reap(peer); }, [this](Peer& peer) { forget(peer); });
  if (draining != 0) {
    next = std::min(next, now + kSoon);
    for (Op* op = live_first; op != nullptr;) {
      Op* after = op->live_after;
      if (op->drain_until_ns != 0 && now >= op->drain_until_ns) {
        drain_expired(*op);
        break;  // that may have ended any other op: look at the rest with the next tick
      }
      op = after;
    }
  }
  {
    const std::lock_guard lock(keys_mutex);
    if (!release_until.empty()) next = std::min(next, now + kSoon);
  }
  expire_releases(now);
  if (!admission.refusals.empty()) {
    advance_refusals(now);
    next = std::min(next, now + kSoon);
  }
  if (close_pending) {
    advance_close(now);
    next = std::min(next, now + kSoon);
  }
  next_tick_ns = next;
}

}  // namespace asyncfabric

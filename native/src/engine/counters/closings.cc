// closings.cc: how the end of a counter gets known to peers, and when its imm may be opened again; and of which opening a count is that leaves
// here. Peers learn generations by slices when they meet, and by closings from then on. Under the engine lock.
#include "engine/counters/closings.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "engine/core.h"

namespace asyncfabric {

// Who was greeted may know the generation of before, so it has to confirm; a greeting that is still to come carries the new one.
void Core::report_closings() {
  if (!counters.has_closed()) return;
  counters.take_closed([this](uint32_t imm, uint32_t generation) {
    generations.set(imm, generation);
    Unconfirmed waits;
    waits.since_ns = now_ns();
    for (const auto& peer : peers) {
      if (peer->ended() || !peer->greeted) continue;
      peer->closings_asked.add(closing_of(imm, generation));
      ++waits.peers;
    }
    if (waits.peers == 0)
      counters.confirm_closed(imm);
    else
      unconfirmed.emplace(imm, std::move(waits));
  });
  for (const auto& peer : peers)
    if (peer->state == PeerState::kConnected) ask_closings(*peer);
}

void Core::send_closings(Peer& peer, uint64_t number, const Closings& closings) {
  send_message(peer, 0, MessageType::kClosed, number,
               {reinterpret_cast<const char*>(closings.data()), closings.size() * sizeof closings[0]});
}

void Core::ask_closings(Peer& peer) {
  if (peer.closings_asked.empty()) return;
  peer.closings_asked.send_new(
      [&](uint64_t number, const Closings& closings) { send_closings(peer, number, closings); });
  remind_later(peer);
}

// One peer fewer has to confirm.
void Core::closing_confirmed(uint32_t imm) {
  const auto found = unconfirmed.find(imm);
  if (found == unconfirmed.end() || --found->second.peers != 0) return;
  counters.confirm_closed(imm);
  for (const uint64_t cookie : found->second.cookies)
    publish({.cookie = cookie, .kind = CompletionKind::kControl, .value = imm});
  unconfirmed.erase(found);
}

// Lost: its lanes are shut, and what it had under way with them counts for nobody.
void Core::forget_closings(Peer& peer) {
  const ClosingsAsked asked = std::exchange(peer.closings_asked, {});
  asked.for_each([this](uint32_t closing) { closing_confirmed(closed_imm(closing)); });
  peer.closings_taken = {};
}

void Core::on_closings_confirmed(Peer& peer, const MessageHeader& header, std::string_view payload) {
  ByteReader reader(payload);
  const uint32_t lane = reader.get<uint8_t>(), lanes = reader.get<uint8_t>();
  if (!reader.done()) return;
  for (const uint32_t closing : peer.closings_asked.confirmed(header.value, lane, lanes))
    closing_confirmed(closed_imm(closing));
  ask_closings(peer);
}

// While slices are under way they could bring back what these closings end: the owner asks again.
void Core::on_closings(Peer& peer, const MessageHeader& header, std::string_view payload) {
  Closings closings(payload.size() / sizeof(uint32_t));
  if (closings.empty() || payload.size() % sizeof(uint32_t) != 0 || closings.size() > kClosingsPerList) return;
  if (peer.generations_from != Generations::kEnd) return;
  std::memcpy(closings.data(), payload.data(), payload.size());
  for (const uint32_t closing : closings)
    if (closed_imm(closing) > kMaxImm) return;
  switch (peer.closings_taken.take(header.value)) {
    case ClosingsTaken::Verdict::kNew:
      closings_there.push_back({peer.id, peer.their_life, header.value, std::move(closings)});
      break;
    case ClosingsTaken::Verdict::kConfirmed: confirm_closings(peer, header.value); break;
    case ClosingsTaken::Verdict::kUnderWay: break;
    case ClosingsTaken::Verdict::kRefused: tallies.messages_refused.add(1); break;
  }
}

// Behind all that was submitted before the closings came: that work is of the counter that is closed.
void Core::take_closings() {
  if (closings_there.empty() || !mailbox.empty()) return;
  for (ClosingsThere& there : std::exchange(closings_there, {})) {
    Peer* peer = find_peer(there.peer);
    if (peer == nullptr || peer->ended() || peer->their_life != there.life) continue;
    std::sort(there.closings.begin(), there.closings.end());
    const auto names = [&](uint32_t imm) {
      const auto found = std::lower_bound(there.closings.begin(), there.closings.end(), closing_of(imm, 0));
      return found != there.closings.end() && closed_imm(*found) == imm;
    };
    for (Op* op = live_first; op != nullptr; op = op->live_after) {
      if (op->imm == kNoImm || !names(static_cast<uint32_t>(op->imm))) continue;
      stamp(*op);
      // Also of an earlier life of theirs, where a transport may still hold it.
      const auto counts_there = [&](const Target& target) {
        const Peer* to = target.stamped ? peer_of(target) : nullptr;
        return to != nullptr && to->incarnation == peer->incarnation;
      };
      if (std::none_of(op->targets.begin(), op->targets.end(), counts_there)) continue;
      op->holds_closings = true;
      closings_held.push_back({op, there.peer, there.life, there.number});
      peer->closings_taken.hold(there.number);
    }
    for (const uint32_t closing : there.closings) peer->counter_generations.set(closed_imm(closing), closing & 3);
    if (peer->closings_taken.release(there.number)) confirm_closings(*peer, there.number);
  }
}

// An op has ended, and nothing of it is under way.
void Core::release_closings(Op& op) {
  op.holds_closings = false;
  std::erase_if(closings_held, [&](const ClosingsHeld& held) {
    if (held.op != &op) return false;
    Peer* peer = find_peer(held.peer);
    if (peer != nullptr && !peer->ended() && peer->their_life == held.life && peer->closings_taken.release(held.number))
      confirm_closings(*peer, held.number);
    return true;
  });
}

// Over each lane: it stands behind the counts that went over that one. While one is down the owner asks again.
void Core::confirm_closings(Peer& peer, uint64_t number) {
  const auto is_open = [this](const Lane& lane) { return open(lane); };
  if (std::any_of(peer.lanes.begin(), peer.lanes.end(), [this](const Lane& lane) { return open(lane) && lane.down; }))
    return;
  const auto lanes = static_cast<uint8_t>(std::count_if(peer.lanes.begin(), peer.lanes.end(), is_open));
  uint8_t index = 0;
  for (uint32_t lane = 0; lane < peer.lanes.size(); ++lane) {
    if (!open(peer.lanes[lane])) continue;
    ByteWriter writer;
    writer.put(index++);
    writer.put(lanes);
    send_message(peer, lane, MessageType::kClosedAck, number, writer.text());
  }
}

Peer* Core::peer_of(const Target& target) const {
  if (target.peer != nullptr) return target.peer;
  if (target.key == nullptr) return find_peer(target.peer_id);
  const auto known = peer_of_incarnation.find(target.key->value.incarnation);
  return known != peer_of_incarnation.end() ? known->second : nullptr;
}

// Counts are of the opening that is known when they are submitted, not when they leave. Whose generations are not known yet is stamped later.
void Core::stamp(Op& op) {
  if (op.imm == kNoImm) return;
  for (Target& target : op.targets) {
    if (target.stamped) continue;
    const Peer* peer = peer_of(target);
    if (peer == nullptr || peer->state != PeerState::kConnected || peer->knows_a_part()) continue;
    target.generation = peer->counter_generations.of(static_cast<uint32_t>(op.imm));
    target.stamped = true;
  }
}

void Core::learn_generations(Peer& peer, std::string_view slice) {
  if (peer.incarnation == incarnation) {
    peer.counter_generations = generations;
    peer.generations_from = Generations::kEnd;
    return;
  }
  if (peer.generations_from == Generations::kEnd) return;  // sent again, or long on its way
  const uint32_t next = peer.counter_generations.learn(peer.generations_from, slice);
  if (next == peer.generations_from) return;
  peer.generations_from = next;
  if (peer.state != PeerState::kConnected) return;  // connected() goes on from here
  if (peer.knows_a_part()) {
    send_message(peer, 0, MessageType::kAskCounters, next, {});
    remind_later(peer);
  } else {
    restart_parked(peer);
  }
}

}  // namespace asyncfabric

// told_generations.cc: which opening of a counter a write is meant for, as peers tell each other: by slices when they meet, one by one for
// counters that are reopened later. Helm.
#include "engine/core.h"

namespace asyncfabric {

// A counter of this imm was open before: peers must stamp their immediates with the new generation before it may be used again. Who is
// meeting us may have been greeted already, with the old one.
void Core::announce_generation(uint32_t imm, uint32_t generation) {
  generations.set(imm, generation);
  for (const auto& peer : peers) {
    if (peer->incarnation == incarnation) {
      peer->counter_generations.set(imm, generation);  // ourselves
    } else if (peer->state == PeerState::kConnected) {
      peer->unconfirmed[imm] = generation;
      send_message(*peer, 0, MessageType::kCounter, imm << 2 | generation, {});
      remind_later(*peer);
    } else if (peer->state == PeerState::kConnecting) {
      peer->unconfirmed[imm] = generation;  // said as soon as they are connected
    }
  }
}

// Imms are picked in a circle, so those that come next are known: peers hear of their generations long before, and nobody waits.
void Core::announce_ahead() {
  constexpr uint32_t kAhead = 1024, kAtOnce = 64;
  const uint32_t next = counters.next_pick();
  if (next_ahead == 0 || CounterTable::picks_between(next, next_ahead) > kAhead) next_ahead = next;
  for (uint32_t i = 0; i < kAtOnce && CounterTable::picks_between(next, next_ahead) < kAhead; ++i) {
    uint32_t generation = 0;
    if (counters.prepare(next_ahead, &generation)) announce_generation(next_ahead, generation);
    next_ahead = CounterTable::pick_after(next_ahead);
  }
}

bool Core::generation_confirmed(uint32_t imm) const {
  for (const auto& peer : peers)
    if (peer->state == PeerState::kConnected && peer->unconfirmed.contains(imm)) return false;
  return true;
}

void Core::learn_generations(Peer& peer, std::string_view slice) {
  if (peer.incarnation == incarnation) {
    peer.counter_generations = generations;
    peer.generations_from = Generations::kEnd;
    return;
  }
  if (peer.generations_from == Generations::kEnd) return;  // said again, or long on its way
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

// While slices are under way a later word could be overtaken by an older slice. It is not confirmed then, so it is said again.
void Core::on_counter(Peer& peer, const MessageHeader& header) {
  const uint64_t imm = header.value >> 2;
  if (imm > kMaxImm || peer.knows_a_part()) return;
  if (peer.generations_from == 0 && peer.state == PeerState::kConnecting) return;
  peer.counter_generations.set(static_cast<uint32_t>(imm), header.value & 3);
  send_message(peer, 0, MessageType::kCounterAck, header.value, {});
}

}  // namespace asyncfabric

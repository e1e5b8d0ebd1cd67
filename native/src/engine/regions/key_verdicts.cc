// key_verdicts.cc: whether a key is still good, reported by its owner's engine. Before the first use the owner is asked; when it revokes
// or releases, it notifies its peers. So a dead key is an error by name on every transport, and only a write that was already under way
// meets the transport's own refusal (INV-3 itself never depends on this file: the rails refuse).
#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "engine/core.h"

namespace asyncfabric {

namespace {

constexpr uint64_t kAskAgainNs = 200'000'000;

std::string question(const KeyTable::Slot& slot) {
  ByteWriter writer;
  writer.put(slot.value.generation);
  writer.put(slot.handle);
  return std::move(writer.text());
}

}  // namespace

void Core::ask_key(KeyTable::Slot& slot, Peer& peer) {
  slot.value.attach = AttachState::kAsking;
  peer.asking.push_back(slot.handle);
  peer.next_ask_ns = now_ns() + kAskAgainNs;
  next_tick_ns = 0;
  send_message(peer, 0, MessageType::kAskKey, slot.value.region, question(slot));
}

void Core::ask_again(Peer& peer, uint64_t now) {
  if (now < peer.next_ask_ns) return;
  peer.next_ask_ns = now + kAskAgainNs;
  std::erase_if(peer.asking, [&](KeyId id) {
    KeyTable::Slot* slot = keys.pin(id);
    if (slot == nullptr) return true;
    const bool open = slot->value.attach == AttachState::kAsking;
    if (open) send_message(peer, 0, MessageType::kAskKey, slot->value.region, question(*slot));
    unpin_key(slot);
    return !open;
  });
}

void Core::on_ask_key(Peer& peer, const MessageHeader& header, std::string_view payload) {
  ByteReader reader(payload);
  const uint64_t generation = reader.get<uint64_t>();
  const std::string_view word = reader.rest();
  if (!reader.ok() || word.size() != sizeof(KeyId)) {
    tallies.messages_refused.add(1);
    return;
  }
  char verdict = 0;
  if (RegionTable::Slot* region = regions.pin(header.value); region != nullptr) {
    {
      const std::lock_guard lock(keys_mutex);
      verdict = region->value.generation == generation ? 1 : 0;
    }
    unpin_region(region);
  }
  KeyId id = 0;
  std::memcpy(&id, word.data(), sizeof id);
  send_message(peer, 0, MessageType::kKeyVerdict, id, {&verdict, 1});
}

void Core::on_key_verdict(Peer& peer, const MessageHeader& header, std::string_view payload) {
  std::erase(peer.asking, header.value);
  KeyTable::Slot* slot = keys.pin(header.value);
  if (slot == nullptr) return;  // closed meanwhile
  RemoteKey& key = slot->value;
  if (key.peer == &peer && key.attach == AttachState::kAsking) {
    if (payload == std::string_view("\1", 1)) {
      attach(*slot, peer);
    } else {
      key.attach = AttachState::kNone;
      key.stale = true;
      fail_parked_on(peer, slot, StatusCode::kStaleKey);
    }
  }
  unpin_key(slot);
}

void Core::on_revoked(Peer& peer, const MessageHeader& header, std::string_view payload) {
  ByteReader reader(payload);
  const uint64_t first_good = reader.get<uint64_t>();
  if (!reader.done()) return;
  keys.for_each([&](KeyTable::Slot& slot) {
    RemoteKey& key = slot.value;
    if (key.incarnation == peer.incarnation && key.region == header.value &&
        (first_good == 0 || key.generation < first_good))
      key.stale = true;
  });
  for (Op* op = live_first; op != nullptr;) {
    Op* after = op->live_after;
    const uint32_t generation = op->generation.load(std::memory_order_relaxed);
    for (uint32_t i = 0; i < op->targets.size() && !op->zombie; ++i) {
      const Target& target = op->targets[i];
      if (target.key == nullptr || !target.key->value.stale || target.peer != &peer || target.failed) continue;
      if (op->parked) {
        for (const Target& each : op->targets)  // it may wait for another of its peers
          if (each.peer != nullptr) std::erase(each.peer->parked, op);
        fail_op(*op, StatusCode::kStaleKey, peer.id);
        break;
      }
      // What is not posted ends here. What is posted ends as its transport reports; one without a report is given up in the end.
      if (op->outstanding.load(std::memory_order_relaxed) != 0) {
        op->revoked = true;
        start_draining(*op);
      }
      const bool all_posted =
          std::none_of(op->legs.begin(), op->legs.end(), [i](const Leg& leg) { return leg.target == i && leg.queued; });
      if (!all_posted || target.fenced) fail_target(*op, i, StatusCode::kStaleKey);
      if (op->generation.load(std::memory_order_relaxed) != generation) break;
    }
    op = after;
  }
}

// Control thread.
void Core::announce_revoked(RegionId region, uint64_t first_good) {
  const Moment moment(*this);
  {
    const std::lock_guard lock(keys_mutex);
    if (RegionTable::Slot* slot = regions.find(region); slot == nullptr || !slot->value.exported) return;
  }
  ByteWriter writer;
  writer.put(first_good);
  for (const auto& peer : peers)
    if (peer->state == PeerState::kConnected) send_message(*peer, 0, MessageType::kRevoked, region, writer.text());
  flush_outgoing();
}

}  // namespace asyncfabric

// attaching.cc: how the memory behind a peer's key is reached, over each lane to the peer.
// The owner may have to show the memory first. The control thread asks and waits for a moment, then other jobs have the thread; it looks again
// until `connect_deadline` is over or the peer is lost. An owner whom hundreds ask at once takes seconds and is in order.
#include <algorithm>
#include <utility>

#include "engine/core.h"

namespace asyncfabric {

namespace {

std::string forged_rail_key(uint32_t field, const RailState& rail) {
  return "the field rail_keys[" + std::to_string(field) + "] of the key is none that its owner's rail (" +
         rail.protocol + ") made: the key is damaged or forged";
}

std::string no_rail_takes(const char* whose, const std::string& protocol) {
  return std::string(whose) + " memory is not registered with a " + protocol +
         " rail, which is what connects the two: that rail refused it when it was registered";
}

}  // namespace

bool Core::carries(const Op& op, const Target& target, const Lane& lane) const {
  if (op.region == nullptr || target.key == nullptr) return true;
  const auto& attached = target.key->value.lanes;  // none any more: the key leads to a later life of its owner
  const size_t index = static_cast<size_t>(&lane - target.peer->lanes.data());
  return op.region->value.memory[lane.rail] && index < attached.size() && attached[index];
}

void Core::note_no_rail(const Op& op, const Target& target) {
  if (target.key == nullptr || target.peer->lanes.empty()) return;
  const bool ours = std::none_of(target.peer->lanes.begin(), target.peer->lanes.end(),
                                 [&](const Lane& lane) { return bool(op.region->value.memory[lane.rail]); });
  note_reason(op.cookie, no_rail_takes(ours ? "this fabric's" : "the target's", target.peer->protocol));
}

struct Core::Attaching {
  struct Way {
    uint32_t rail;
    uint32_t remote_rail;
    RailPeer* peer;   // stays as long as the peer has visitors
    std::string key;  // "": the owner's rail could not take that memory
    std::unique_ptr<RemoteMemory> memory;
  };

  KeyTable::Slot* key = nullptr;  // pinned
  PeerId peer = 0;
  uint64_t deadline_ns = 0;
  std::vector<Way> ways;  // in the order of the peer's lanes
  size_t reached = 0;     // so many of them
  Pauses pauses;
  Status status;
  std::string why;
};

void Core::attach(KeyTable::Slot& slot, Peer& peer) {
  slot.value.attach = AttachState::kPending;
  keys.add_pin(&slot);  // the op that asks holds one, so the key is there; it may end before this job runs
  ++peer.visitors;
  const auto job = std::make_shared<Attaching>();
  job->key = &slot;
  job->peer = peer.id;
  job->deadline_ns = from_now(config.connect_deadline_ns);
  // The key gives by itself how many rails its owner has; we know the owner, and keys may be forged.
  const std::vector<std::string>& keys_there = slot.value.rail_keys;
  for (const Lane& lane : peer.lanes) {
    const bool there = lane.remote_rail < keys_there.size();
    if (!there && job->status.ok()) {
      job->status = StatusCode::kAccessDenied;
      job->why = forged_rail_key(lane.remote_rail, *rails[lane.rail]);
    }
    job->ways.push_back({lane.rail, lane.remote_rail, lane.handle.get(),
                         there ? keys_there[lane.remote_rail] : std::string(), nullptr});
  }
  control.post([this, job] { go_on_attaching(job); });
}

void Core::go_on_attaching(const std::shared_ptr<Attaching>& job) {
  Attaching& now = *job;
  {
    const Moment moment(*this);
    if (find_peer(now.peer)->state != PeerState::kConnected) now.status = StatusCode::kPeerDead;
  }
  for (; now.status.ok() && now.reached < now.ways.size(); ++now.reached, now.pauses = {}) {
    Attaching::Way& way = now.ways[now.reached];
    if (way.key.empty()) continue;
    const uint64_t time = now_ns(), left = now.deadline_ns > time ? now.deadline_ns - time : 0;
    const uint64_t patience = now.pauses.latest_ns == 0 ? std::min(left, kControlTurnNs) : 0;
    now.status = at_rail(way.rail, [&](Rail& rail) { return rail.attach(*way.peer, way.key, patience, &way.memory); });
    if (now.status.code == StatusCode::kBusy && left != 0) {
      now.status = {};
      return control.post_later(now.pauses.next_ns(), [this, job] { go_on_attaching(job); });
    }
    if (now.status.code == StatusCode::kBusy) {
      now.status = StatusCode::kTimeout;
      now.why = "the peer answers, but has not shown the memory of the key within " +
                std::to_string(config.connect_deadline_ns / 1'000'000) + " ms (connect_deadline)";
    } else if (now.status.code == StatusCode::kInvalidArgument) {  // no mistake in a call of our user
      now.status = StatusCode::kAccessDenied;
      now.why = forged_rail_key(way.remote_rail, *rails[way.rail]);
    } else if (!now.status.ok()) {
      now.why = rails[way.rail]->rail->why();
    }
  }
  if (now.status.ok() && std::all_of(now.ways.begin(), now.ways.end(), [](const auto& way) { return !way.memory; })) {
    now.status = StatusCode::kUnsupported;
    now.why = no_rail_takes("the target's", rails[now.ways.front().rail]->protocol);
  }
  attached(now);
}

void Core::attached(Attaching& job) {
  {
    const Moment moment(*this);
    Peer& peer = *find_peer(job.peer);
    --peer.visitors;
    RemoteKey& key = job.key->value;
    std::vector<std::unique_ptr<RemoteMemory>> lanes;
    for (Attaching::Way& way : job.ways) lanes.push_back(std::move(way.memory));
    if (key.peer == &peer && key.attach == AttachState::kPending) {
      if (job.status.ok() && peer.state == PeerState::kConnected) {
        key.lanes = std::move(lanes);
        key.attach = AttachState::kAttached;
      } else {
        key.attach = AttachState::kNone;
        fail_parked_on(peer, job.key, job.status, job.why);
      }
    }
    for (auto& left : lanes)
      if (left) peer.graveyard.push_back(std::move(left));
    restart_parked(peer);
  }
  unpin_key(job.key);
}

// An attachment was refused: the ops that need it end, the others of the peer go on.
void Core::fail_parked_on(Peer& peer, KeyTable::Slot* key, Status status, const std::string& why) {
  std::vector<Op*> doomed;
  for (Op* op : peer.parked)
    for (const Target& target : op->targets)
      if (target.key == key) {
        doomed.push_back(op);
        break;
      }
  for (Op* op : doomed) {
    std::erase(peer.parked, op);
    note_reason(op->cookie, why);
    fail_op(*op, status, peer.id);
  }
}

}  // namespace asyncfabric

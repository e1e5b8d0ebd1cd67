// peer_list.h: the peers of one engine. A lost one that holds nothing any more rests: nobody looks at it who looks at all peers, and of those
// that rest the latest are kept, so that a fabric which meets others for months neither grows nor gets slower. Under the engine lock.
#pragma once

#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/peers/peer.h"

namespace asyncfabric {

class PeerList {
 public:
  // As long as one rests, what is meant for it is refused at once; later it is tried to connect to it, in vain.
  static constexpr size_t kMostResting = 1024;

  Peer& add() {
    Peer& peer = *awake_.emplace_back(std::make_unique<Peer>());
    peer.id = ++last_;
    by_id_.emplace(peer.id, &peer);
    return peer;
  }
  Peer* find(PeerId id) const {
    const auto found = by_id_.find(id);
    return found != by_id_.end() ? found->second : nullptr;
  }
  bool existed(PeerId id) const { return id != 0 && id <= last_; }

  // Moves the lost peers that `rests` accepts. Calls forget(peer) for each that is not kept any more, then frees it.
  template <class Rests, class Forget>
  void lay_down(Rests rests, Forget forget) {
    const auto stay =
        std::stable_partition(awake_.begin(), awake_.end(), [&](const auto& peer) { return !rests(*peer); });
    std::move(stay, awake_.end(), std::back_inserter(resting_));
    awake_.erase(stay, awake_.end());
    for (; resting_.size() > kMostResting; resting_.pop_front()) {
      forget(*resting_.front());
      by_id_.erase(resting_.front()->id);
    }
  }

  // All that are not at rest, the oldest first.
  auto begin() const { return awake_.begin(); }
  auto end() const { return awake_.end(); }
  size_t awake() const { return awake_.size(); }
  Peer& operator[](size_t index) const { return *awake_[index]; }  // of those, also while more are added

  // Those that are known and more than a hello, in the order in which they were met.
  std::vector<const Peer*> all() const {
    std::vector<const Peer*> found;
    for (const auto& [id, peer] : by_id_)
      if (!peer->is_stranger()) found.push_back(peer);
    std::sort(found.begin(), found.end(), [](const Peer* one, const Peer* other) { return one->id < other->id; });
    return found;
  }
  size_t known() const { return by_id_.size(); }

 private:
  PeerId last_ = 0;
  std::vector<std::unique_ptr<Peer>> awake_;
  std::deque<std::unique_ptr<Peer>> resting_;
  std::unordered_map<PeerId, Peer*> by_id_;
};

}  // namespace asyncfabric

// admission.h: who may speak over which connection. A connection belongs to one peer: the one whose hello, welcome or proof came over it
// first; what names another sender is refused. With a secret only a proof makes it belong to anybody. Under the engine lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/peers/peer.h"
#include "provider/provider.h"

namespace asyncfabric {

enum class SecretMismatch : uint8_t { kSenderHasOne = 1, kSenderHasNone = 2, kTheyDiffer = 3 };

class Admission {
 public:
  // Refusals under way at a time: whoever floods us with wrong hellos gets no more answers than these, each for kRefusalNs at most.
  static constexpr size_t kMostRefusals = 8;
  static constexpr uint64_t kRefusalNs = 1'000'000'000;
  static constexpr uint64_t kRefusalConnectNs = 50'000'000;
  // Peers that sent hello and did not show yet that they got our answer; more hellos are dropped, and their senders repeat them.
  static constexpr size_t kMostUnfinished = 256;

  // The answer to a hello that shows no or another secret: sent over a connection of its own, since its sender becomes no peer.
  struct Refusal {
    uint64_t number = 0;
    uint64_t until_ns = 0;
    uint32_t rail = 0;
    std::unique_ptr<RailPeer> path;  // once it is connected
    std::string message;
    bool sent = false;
  };

  PeerId owner(Inbound way) const {
    const auto found = owners_.find(way);
    return found != owners_.end() ? found->second : 0;
  }
  void give(Inbound way, PeerId peer) { owners_[way] = peer; }
  void take_back(const Peer& peer) {
    for (const Inbound& way : peer.inbound)
      if (owner(way) == peer.id) owners_.erase(way);
  }
  size_t owned() const { return owners_.size(); }

  std::vector<Refusal> refusals;
  uint64_t next_refusal = 1;

 private:
  std::map<Inbound, PeerId> owners_;
};

}  // namespace asyncfabric

// kept.h: mappings of peers' memory that outlive the key they were opened for. A revocation changes the key and not the memory, and
// mapping gigabytes takes a quarter of a second for each: who gets a new key of the same registration finds its mapping here. What a
// key allows its owner states when the key is shown, and the board states at each post whether it is still good. Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "providers/local/memory/mapping.h"
#include "providers/local/peers/outgoing.h"

namespace asyncfabric::local {

class Kept {
 public:
  // The mapping of the registration that `remote` is a key of; null: none is kept.
  std::shared_ptr<Mapping> find(const RemoteHandle& remote);
  void keep(const RemoteHandle& remote);  // its mapping
  // Lets go of mappings whose registration is gone, or whose peer is. False: none is left.
  bool prune();

 private:
  struct One {
    std::weak_ptr<Outgoing> link;
    uint32_t slot = 0;
    uint64_t length = 0;
    uint64_t life = 0;  // distinguishes registrations that had the slot one after the other
    std::shared_ptr<Mapping> mapping;

    bool gone() const;
  };

  std::mutex mutex_;
  std::vector<One> kept_;
};

}  // namespace asyncfabric::local

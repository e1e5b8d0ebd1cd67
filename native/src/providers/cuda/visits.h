// visits.h: mappings of peers' GPU memory that outlive the key they were opened for. A revocation changes the key and not the
// memory, and mapping gigabytes takes ten milliseconds: who gets a new key of the same registration finds its mapping here.
// What a key allows its owner states when the key is shown, and the board states at each post whether it is still good.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "providers/cuda/memory.h"
#include "providers/local/peers/outgoing.h"

namespace asyncfabric::cuda {

class Visits {
 public:
  // The mapping of the registration that `remote` is a key of; null: none is kept. [control]
  std::shared_ptr<Visit> find(const local::RemoteHandle& remote);
  void keep(const local::RemoteHandle& remote, const std::shared_ptr<Visit>& visit);  // [control]

  // Lets go of mappings whose registration is gone, or whose peer is. Any thread.
  void prune();

 private:
  struct Kept {
    std::weak_ptr<local::Outgoing> link;
    uint32_t slot = 0;
    uint64_t length = 0;
    uint64_t life = 0;  // distinguishes registrations that had the slot one after the other
    std::shared_ptr<Visit> visit;

    bool gone() const;
  };

  std::mutex mutex_;
  std::vector<Kept> kept_;
};

}  // namespace asyncfabric::cuda

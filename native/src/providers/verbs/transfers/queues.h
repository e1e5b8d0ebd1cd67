// queues.h: what a rail holds on one opening of its device, beside the queue pairs: the completion queue of all of them and the receives. Made
// where the device is opened (opening and service thread), then the lock holder's; the service thread destroys it with the device.
#pragma once

#include <memory>
#include <string>

#include "providers/verbs/transfers/receives.h"

namespace asyncfabric::verbs {

constexpr uint32_t kSendSlots = 128;

std::string no_memory_for_messages(Status status);

struct Queues {
  static Status open(const Device& device, std::shared_ptr<Queues>* out, std::string* detail);

  // In the order of opening; they go the other way round.
  Owned<ibv_comp_channel> channel;
  Owned<ibv_cq> cq;
  std::unique_ptr<Receives> receives;
  uint32_t most_in_device = 0;  // requests in all send queues at a time
};

}  // namespace asyncfabric::verbs

// queues.cc: see queues.h.
#include "providers/verbs/transfers/queues.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "providers/verbs/peers/exchange.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint32_t kMostInDevice = 4096;
// Completions of credits, given and received, of all peers, each connected in both directions.
constexpr uint32_t kCreditEntries = kMaxPeers * (kCreditReceives + kCreditSends);

}  // namespace

std::string no_memory_for_messages(Status status) {
  return std::string("verbs: memory for messages cannot be registered (") + std::strerror(status.raw) +
         "); is `ulimit -l` large enough?";
}

Status Queues::open(const Device& device, std::shared_ptr<Queues>* out, std::string* detail) {
  const Library& library = device.library();
  const auto fail = [&](const char* what) {
    *detail = "verbs: " + device.name() + ": " + what + " failed (" + std::strerror(errno) + ")";
    return Status{StatusCode::kNoProvider, errno};
  };
  auto made = std::make_shared<Queues>();
  made->channel = own(library.ibv_create_comp_channel(device.context()), library.ibv_destroy_comp_channel);
  if (!made->channel) return fail("ibv_create_comp_channel");
  (void)fcntl(made->channel->fd, F_SETFL, fcntl(made->channel->fd, F_GETFL) | O_NONBLOCK);
  std::unique_ptr<Receives> receives;
  const uint32_t most_messages = kSpareSlots + kWindow * kMaxWindows;
  if (const Status status = Receives::open(device, most_messages, &receives, detail); !status.ok()) return status;
  // Everything that may complete at the same time fits: each request of each send queue (all of them complete when a queue pair
  // breaks), each posted receive, and the credits.
  const uint32_t others = receives->count_depth() + receives->message_depth() + kCreditEntries;
  const uint32_t wanted = std::min(kMostInDevice + others, static_cast<uint32_t>(device.limits().max_cqe));
  made->cq = own(library.ibv_create_cq(device.context(), static_cast<int>(wanted), nullptr, made->channel.get(), 0),
                 library.ibv_destroy_cq);
  if (!made->cq) return fail("ibv_create_cq");
  if (static_cast<uint32_t>(made->cq->cqe) < others + 64) return fail("a completion queue that is large enough");
  made->most_in_device = std::min(kMostInDevice, static_cast<uint32_t>(made->cq->cqe) - others);
  made->receives = std::move(receives);
  std::shared_ptr<ReceiveBlock> spare;
  if (const Status status = ReceiveBlock::make(device, kSpareSlots, &spare); !status.ok()) {
    *detail = no_memory_for_messages(status);
    return status;
  }
  made->receives->add(std::move(spare));
  *out = std::move(made);
  return {};
}

}  // namespace asyncfabric::verbs

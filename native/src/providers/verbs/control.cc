// control.cc: life of a rail, its memory and its connections. Control thread, but for opening.
#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "providers/verbs/device/errors.h"
#include "providers/verbs/memory/memory.h"
#include "providers/verbs/rail.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint64_t kLongestRequest = 1ull << 30;

const char* trouble_text(Trouble trouble) {
  switch (trouble) {
    case Trouble::kNone: return "";
    case Trouble::kPort: return "; down: its port is not active";
    case Trouble::kAddress: return "; down: the port has lost the address that peers know";
    case Trouble::kDevice: return "; down: the device failed, trying to open it again";
  }
  return "";
}

}  // namespace

VerbsRail::VerbsRail(std::shared_ptr<Device> device)
    : device_(std::move(device)), handover_(std::make_shared<Handover>()), ethernet_(device_->ethernet()) {
  capabilities_.ordered = true;
  capabilities_.read = true;
  capabilities_.concurrent_control = true;
  capabilities_.max_request_bytes = std::min(kLongestRequest, device_->max_message_bytes());
  capabilities_.max_send_bytes = kPayloadBytes;
  handed_out_.reserve(256);
}

Status VerbsRail::open(const Library& library, const Options& options, std::unique_ptr<Rail>* out,
                       std::string* detail) {
  std::unique_ptr<Device> device;
  if (const Status status = Device::open(library, options, &device, detail); !status.ok()) return status;
  std::unique_ptr<VerbsRail> rail(new VerbsRail(std::move(device)));
  if (const Status status = rail->make(detail); !status.ok()) return status;
  *out = std::move(rail);
  return {};
}

Status VerbsRail::make(std::string* detail) {
  if (!handover_->ok()) {
    *detail = std::string("verbs: eventfd: ") + std::strerror(errno);
    return {StatusCode::kInternal, errno};
  }
  registry_ = std::make_shared<Registry>(device_, random_word());
  if (const Status status = Queues::open(*device_, &queues_, detail); !status.ok()) return status;
  if (const Status status = ReceiveBlock::make(*device_, kSendSlots, &send_block_); !status.ok()) {
    *detail = no_memory_for_messages(status);
    return status;
  }
  for (uint32_t slot = 0; slot < kSendSlots; ++slot) free_sends_.push_back(slot);
  std::unique_ptr<Postbox> box;
  if (const Status status = Postbox::open(*device_, &box, detail); !status.ok()) return status;
  wait_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!wait_ || !watch(handover_->news_fd()) || !watch(queues_->channel->fd)) {
    *detail = std::string("verbs: epoll: ") + std::strerror(errno);
    return {StatusCode::kNoProvider, errno};
  }
  exchange_ = std::make_unique<Exchange>(*device_, *queues_, std::move(box), registry_, send_block_, handover_);
  address_ = exchange_->address();
  return exchange_->start(detail);
}

bool VerbsRail::watch(int fd) const {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  return epoll_ctl(wait_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

// Queue pairs first, since receives, completion queue and memory are in use while one exists. Handles and registrations that the
// engine still holds keep what they need: the letter boxes, the device.
VerbsRail::~VerbsRail() {
  exchange_.reset();  // joined; its queue pairs are gone
  if (handover_->ok()) {
    (void)handover_->jobs();  // both may carry queue pairs
    (void)handover_->news();
  }
  for (const std::shared_ptr<Connection>& connection : table_)
    if (connection != nullptr)
      for (Lane& lane : connection->lanes) lane.pair.qp.reset();
  if (!queues_) return;
  cancel_wait();
  if (unacked_events_ != 0) device_->library().ibv_ack_cq_events(queues_->cq.get(), unacked_events_);
  queues_.reset();
}

RailInfo VerbsRail::info() const {
  RailInfo out;
  out.provider = "verbs";
  out.device = device_->name();
  out.library = device_->library().path;
  out.version = device_->description() + trouble_text(device_->trouble());
  if (const uint32_t again = openings_.load(std::memory_order_relaxed) - 1; again != 0)
    out.version += "; opened again after failures: " + std::to_string(again);
  out.gbits_per_s = device_->gbits_per_s();
  out.ordered = capabilities_.ordered;
  out.can_read = capabilities_.read;
  return out;
}

std::string VerbsRail::address() const { return encode(address_); }

Figures VerbsRail::figures() const {
  Figures now = figures_;
  if (queues_) now.receive_posts = queues_->receives->posts();
  return now;
}

Status VerbsRail::register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) {
  std::unique_ptr<Registration> registration;
  if (const Status status = registry_->add(memory, &registration, key); !status.ok()) return status;
  *out = std::move(registration);
  return {};
}

Status VerbsRail::narrow_key(LocalMemory& memory, const KeyScope& scope, std::string* key) {
  return registry_->narrow(static_cast<Registration&>(memory), scope, key);
}

// Deregistering waits for the device: on return it touches nothing through the old key. Writes that meet it on the way are refused.
Status VerbsRail::revoke_memory(LocalMemory& memory, uint64_t, std::string* new_key) {
  return registry_->renew(static_cast<Registration&>(memory), new_key);
}

Status VerbsRail::release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t) {
  if (const Status status = registry_->close(static_cast<Registration&>(*memory)); !status.ok()) return status;
  memory.reset();
  return {};
}

// Does not wait: messages to the peer are kept until the queue pairs are there, and 256 peers, some of them dead, connect side by
// side. A peer that does not answer within the patience is reported as lost.
Status VerbsRail::connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) {
  RailAddress remote;
  if (!parse(address, &remote)) return StatusCode::kInvalidArgument;
  if ((remote.ethernet != 0) != ethernet_) return StatusCode::kPeerUnreachable;
  auto connection = std::make_shared<Connection>(random_word(), remote, from_now(patience_ns));
  *out = std::make_unique<PeerHandle>(connection, handover_);
  Job job;
  job.kind = JobKind::kConnect;
  job.connection = std::move(connection);
  handover_->ask(std::move(job));
  return {};
}

Status VerbsRail::attach(RailPeer& peer, std::string_view key, uint64_t, std::unique_ptr<RemoteMemory>* out) {
  MemoryKey parts;
  if (!parse(key, &parts)) return StatusCode::kInvalidArgument;
  if (parts.incarnation != connection_of(&peer).remote.incarnation) return StatusCode::kStaleKey;
  *out = std::make_unique<RemoteRegion>(parts);
  return {};
}

}  // namespace asyncfabric::verbs

// control.cc: life of a rail, its memory and its connections. Control thread, but for opening.
#include <fcntl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "providers/verbs/errors.h"
#include "providers/verbs/memory.h"
#include "providers/verbs/rail.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint32_t kSendSlots = 128;
constexpr uint32_t kMostInDevice = 4096;
// Completions of credits, given and received, of as many peers as have receives of their own, each connected in both directions.
constexpr uint32_t kCreditEntries = kMaxWindows * (kCreditReceives + kCreditSends);
constexpr uint64_t kLongestRequest = 1ull << 30;

const char* trouble_text(Trouble trouble) {
  switch (trouble) {
    case Trouble::kNone: return "";
    case Trouble::kPort: return "; down: its port is not active";
    case Trouble::kAddress: return "; down: the port has lost the address that peers know";
    case Trouble::kDevice: return "; down: the device failed, open the fabric again";
  }
  return "";
}

}  // namespace

VerbsRail::VerbsRail(std::shared_ptr<Device> device)
    : device_(std::move(device)), handover_(std::make_shared<Handover>()) {
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
  if (const Status status = make_queues(detail); !status.ok()) return status;
  std::shared_ptr<ReceiveBlock> spare;
  Status status = ReceiveBlock::make(*device_, kSpareSlots, &spare);
  if (status.ok()) status = ReceiveBlock::make(*device_, kSendSlots, &send_block_);
  if (!status.ok()) {
    *detail = std::string("verbs: memory for messages cannot be registered (") + std::strerror(status.raw) +
              "); is `ulimit -l` large enough?";
    return status;
  }
  receives_->add(std::move(spare));
  for (uint32_t slot = 0; slot < kSendSlots; ++slot) free_sends_.push_back(slot);
  std::unique_ptr<Postbox> box;
  if (status = Postbox::open(*device_, &box, detail); !status.ok()) return status;
  exchange_ = std::make_unique<Exchange>(*device_, cq_.get(), *receives_, std::move(box), handover_);
  address_ = exchange_->address();
  return exchange_->start(detail);
}

Status VerbsRail::make_queues(std::string* detail) {
  const Library& library = device_->library();
  const auto fail = [&](const char* what) {
    *detail = "verbs: " + device_->name() + ": " + what + " failed (" + std::strerror(errno) + ")";
    return Status{StatusCode::kNoProvider, errno};
  };
  const uint32_t most_messages = kSpareSlots + kWindow * kMaxWindows;
  if (const Status status = Receives::open(*device_, most_messages, &receives_, detail); !status.ok()) return status;
  channel_ = own(library.ibv_create_comp_channel(device_->context()), library.ibv_destroy_comp_channel);
  if (!channel_) return fail("ibv_create_comp_channel");
  (void)fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  // Everything that may complete at the same time fits: each request of each send queue (all of them complete when a queue pair
  // breaks), each posted receive, and the credits.
  const uint32_t others = receives_->count_depth() + receives_->message_depth() + kCreditEntries;
  const uint32_t wanted = std::min(kMostInDevice + others, static_cast<uint32_t>(device_->limits().max_cqe));
  cq_ = own(library.ibv_create_cq(device_->context(), static_cast<int>(wanted), nullptr, channel_.get(), 0),
            library.ibv_destroy_cq);
  if (!cq_) return fail("ibv_create_cq");
  if (static_cast<uint32_t>(cq_->cqe) < others + 64) return fail("a completion queue that is large enough");
  most_in_device_ = std::min(kMostInDevice, static_cast<uint32_t>(cq_->cqe) - others);
  wait_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  for (const int fd : {channel_->fd, handover_->news_fd()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (!wait_ || epoll_ctl(wait_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return fail("epoll");
  }
  return {};
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
  if (cq_) cancel_wait();
  if (unacked_events_ != 0) device_->library().ibv_ack_cq_events(cq_.get(), unacked_events_);
  cq_.reset();
}

RailInfo VerbsRail::info() const {
  RailInfo out;
  out.provider = "verbs";
  out.device = device_->name();
  out.library = device_->library().path;
  out.version = "port " + std::to_string(device_->port()) + ", GID " + device_->gid().text() + ", firmware " +
                device_->limits().fw_ver + trouble_text(device_->trouble());
  out.gbits_per_s = device_->gbits_per_s();
  out.ordered = capabilities_.ordered;
  out.can_read = capabilities_.read;
  return out;
}

std::string VerbsRail::address() const { return encode(address_); }

Figures VerbsRail::figures() const {
  Figures now = figures_;
  now.receive_posts = receives_->posts();
  return now;
}

Status VerbsRail::register_memory(const Memory& memory, std::unique_ptr<LocalMemory>* out, std::string* key) {
  std::unique_ptr<Registration> registration;
  if (const Status status = Registration::create(device_, address_.incarnation, memory, &registration, key);
      !status.ok())
    return status;
  *out = std::move(registration);
  return {};
}

// Deregistering waits for the device: on return it touches nothing through the old key. Writes that meet it on the way are refused.
Status VerbsRail::revoke_memory(LocalMemory& memory, uint64_t, std::string* new_key) {
  return static_cast<Registration&>(memory).renew(new_key);
}

Status VerbsRail::release_memory(std::unique_ptr<LocalMemory>& memory, uint64_t) {
  if (const Status status = static_cast<Registration&>(*memory).close(); !status.ok()) return status;
  memory.reset();
  return {};
}

// Does not wait: messages to the peer are kept until the queue pairs are there, and 256 peers, some of them dead, connect side by
// side. A peer that does not answer within the patience is reported as lost.
Status VerbsRail::connect(std::string_view address, uint64_t patience_ns, std::unique_ptr<RailPeer>* out) {
  RailAddress remote;
  if (!parse(address, &remote)) return StatusCode::kInvalidArgument;
  if (remote.ethernet != address_.ethernet) return StatusCode::kPeerUnreachable;
  const uint64_t now = now_ns();
  const uint64_t until = patience_ns < ~0ull - now ? now + patience_ns : ~0ull;
  auto connection = std::make_shared<Connection>(random_word(), remote, until);
  *out = std::make_unique<PeerHandle>(connection, handover_);
  Job job;
  job.kind = JobKind::kConnect;
  job.connection = std::move(connection);
  handover_->ask(std::move(job));
  return {};
}

Status VerbsRail::attach(RailPeer& peer, std::string_view key, std::unique_ptr<RemoteMemory>* out) {
  MemoryKey parts;
  if (!parse(key, &parts)) return StatusCode::kInvalidArgument;
  if (parts.incarnation != connection_of(&peer).remote.incarnation) return StatusCode::kStaleKey;
  *out = std::make_unique<RemoteRegion>(parts);
  return {};
}

}  // namespace asyncfabric::verbs

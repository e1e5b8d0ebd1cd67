// rail.cc: opening and closing a local rail, and its engine lock calls. See rail.h.
#include "providers/local/rail.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include <utility>

#include "base/clock.h"
#include "providers/local/peers/identity.h"

namespace asyncfabric {

Status open_local_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail);

Status open_local_rail(const RailSpec& spec, std::unique_ptr<Rail>* out, std::string* detail) {
  local::Options options;
  if (const Status status = local::parse_options(spec, &options, detail); !status.ok()) return status;
  return local::LocalRail::open(options, out, detail);
}

}  // namespace asyncfabric

namespace asyncfabric::local {
namespace {

constexpr uint64_t kCloseDrainNs = 1'000'000'000;

// What a peer's process_vm_readv is tried on.
const uint64_t kProbeWord = random_word();

}  // namespace

Status LocalRail::open(const Options& options, std::unique_ptr<Rail>* out, std::string* detail) {
  std::unique_ptr<Rooms> rooms;
  if (const Status status = make_rooms(options, &rooms, detail); !status.ok()) return status;
  std::unique_ptr<LocalRail> rail(new LocalRail(options, std::move(rooms)));
  if (const Status status = rail->start_service(detail); !status.ok()) return status;
  *out = std::move(rail);
  return {};
}

Status LocalRail::make_rooms(const Options& options, std::unique_ptr<Rooms>* out, std::string* detail) {
  Reception reception;
  std::shared_ptr<Mapping> board;
  std::shared_ptr<WaitSet> waits;
  Status status = Mapping::create(FileRole::kBoard, sizeof(Board), &board, &reception.board_file);
  if (status.ok()) status = WaitSet::open(board, &waits);
  if (!status.ok()) {
    *detail = std::string("local: cannot create shared memory files: ") + std::strerror(status.raw);
    return status;
  }
  reception.rail_id = random_word();
  char name[64];
  std::snprintf(name, sizeof name, "asyncfabric-%016llx%016llx", static_cast<unsigned long long>(random_word()),
                static_cast<unsigned long long>(random_word()));
  reception.socket_name = name;

  auto* words = board->as<Board>();
  words->magic = kBoardMagic;
  words->version = kLayoutVersion;
  words->probe_address = reinterpret_cast<uint64_t>(&kProbeWord);
  words->probe_value = kProbeWord;

  auto rooms = std::make_unique<Rooms>(options, std::move(board), std::move(waits));
  rooms->reception = std::move(reception);
  *out = std::move(rooms);
  return {};
}

LocalRail::LocalRail(const Options& options, std::unique_ptr<Rooms> rooms)
    : options_(options), rooms_(std::move(rooms)) {
  capabilities_.ordered = true;
  capabilities_.synchronous = true;
  capabilities_.read = true;
  capabilities_.gathers = true;
  capabilities_.concurrent_control = true;
  capabilities_.resumes_connect = true;
  capabilities_.reports_peer_loss = true;
  capabilities_.same_host_only = true;
  capabilities_.maps = true;
  capabilities_.max_request_bytes = kMaxRequestBytes;
  capabilities_.step_bytes = 2 * kMaxRequestBytes;
  capabilities_.step_requests = Poster::kMostTogether;
  capabilities_.max_send_bytes = kMaxSendBytes;
  const RailAddress address{host_identity(), getpid(), process_start(getpid()), rooms_->reception.rail_id,
                            rooms_->reception.socket_name};
  address_ = encode_address(address);
}

LocalRail::~LocalRail() {
  rooms_->board->as<Board>()->closed.store(1, std::memory_order_seq_cst);
  rooms_->regions.remove_all(now_ns() + kCloseDrainNs, [this] { return rooms_->connections->census(); });
  rooms_->service.stop();
}

RailInfo LocalRail::info() const {
  RailInfo info;
  info.provider = "local";
  info.device = "host";
  info.version = std::string("shared memory, ") + rooms_->copier.name();
  info.ordered = true;
  info.can_read = true;
  return info;
}

size_t LocalRail::poll(std::span<RailEvent> events) {
  Rooms& rooms = *rooms_;
  rooms.receiver.begin_poll();
  rooms.poster.settle();
  size_t count = rooms.poster.done().take(events);
  count += rooms.receiver.drain(events.subspan(count));
  if (rooms.connections->has_news()) take_news();
  if (!rooms.receiver.has_leaving() && lost_.empty()) return count;
  count += rooms.receiver.drain_leaving(events.subspan(count));
  count += rooms.poster.done().take(events.subspan(count));
  // The loss is reported after all that the peer still sent and after what it leaves undone.
  while (!lost_.empty() && !rooms.receiver.has_leaving() && rooms.poster.done().empty() && count < events.size()) {
    if (RailPeer* handle = rooms.connections->handle_of(*lost_.back()); handle != nullptr) {
      RailEvent& event = events[count++];
      event = RailEvent();
      event.kind = RailEventKind::kPeerLost;
      event.status = StatusCode::kPeerDead;
      event.peer = handle;
    }
    lost_.pop_back();
  }
  return count;
}

void LocalRail::take_news() {
  const size_t known = lost_.size();
  rooms_->connections->take_news(&news_leaving_, &lost_);
  rooms_->receiver.add_leaving(news_leaving_);
  for (size_t i = known; i < lost_.size(); ++i) rooms_->poster.fail_all(*lost_[i], StatusCode::kPeerDead);
}

bool LocalRail::has_events() {
  return !rooms_->poster.done().empty() || !lost_.empty() || rooms_->connections->has_news() ||
         rooms_->receiver.has_work();
}

bool LocalRail::prepare_wait() {
  rooms_->waits->fall_asleep();
  if (!has_events() && rooms_->poster.may_sleep()) return true;
  rooms_->waits->stay_awake();
  return false;
}

void LocalRail::cancel_wait() {
  rooms_->waits->stay_awake();
  rooms_->waits->drain();
  rooms_->receiver.look_everywhere();
}

Status LocalRail::disconnect(RailPeer& peer) {
  Outgoing& link = *static_cast<PeerHandle&>(peer).link;
  link.closed = true;
  rooms_->poster.fail_all(link, StatusCode::kCancelled);
  rooms_->connections->forget(link.serial);
  shutdown(link.socket.get(), SHUT_RDWR);
  return {};
}

}  // namespace asyncfabric::local

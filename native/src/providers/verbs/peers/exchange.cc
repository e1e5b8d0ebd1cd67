// exchange.cc: the service thread's loop and the half that opens connections; incoming.cc has the other half.
#include "providers/verbs/peers/exchange.h"

#include <pthread.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/start_thread.h"

namespace asyncfabric::verbs {
namespace {

constexpr uint64_t kFirstGapNs = 20'000'000;
constexpr uint64_t kLongestGapNs = 500'000'000;
constexpr uint32_t kByes = 4;
constexpr uint64_t kLookAgainNs = 1'000'000'000;  // should the event that an address is back be lost
constexpr uint64_t kAskAgainNs = 50'000'000;
constexpr uint64_t kFarewellNs = 100'000'000;  // what closing a rail may wait for its last datagrams to leave

}  // namespace

Exchange::Exchange(Device& device, const Queues& queues, std::unique_ptr<Postbox> box,
                   std::shared_ptr<Registry> registry, std::shared_ptr<ReceiveBlock> sends,
                   std::shared_ptr<Handover> handover)
    : device_(device),
      queues_(&queues),
      box_(std::move(box)),
      registry_(std::move(registry)),
      sends_(std::move(sends)),
      handover_(std::move(handover)) {
  address_.incarnation = registry_->incarnation();
  move_in();
}

// Where this end is reached in the present life of the device.
void Exchange::move_in() {
  address_.gid = device_.gid().gid;
  address_.lid = device_.lid();
  address_.mtu = static_cast<uint8_t>(device_.mtu());
  address_.ethernet = device_.ethernet() ? 1 : 0;
  address_.qpn = box_->qpn();
  address_.qkey = box_->qkey();
}

Exchange::~Exchange() {
  handover_->stop();
  if (thread_.joinable()) thread_.join();
}

// What is watched closes with the device, and leaves the set by that.
bool Exchange::watch(std::initializer_list<int> descriptors) const {
  for (const int fd : descriptors) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return false;
  }
  return true;
}

Status Exchange::start(std::string* detail) {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_ || !watch({box_->fd(), handover_->jobs_fd(), device_.context()->async_fd})) {
    *detail = std::string("verbs: epoll: ") + std::strerror(errno);
    return {epoll_ ? StatusCode::kInternal : StatusCode::kNoMemory, errno};
  }
  if (const Status status = start_thread([this] { run(); }, &thread_, detail); !status.ok()) return status;
  pthread_setname_np(thread_.native_handle(), "af-verbs");
  return {};
}

void Exchange::run() {
  const auto take = [this](std::string_view bytes) { take_datagram(bytes); };
  uint64_t next = ~0ull;
  while (!handover_->stopping()) {
    int limit_ms = -1;
    if (next != ~0ull) {
      const uint64_t now = now_ns();
      limit_ms = next > now ? static_cast<int>(std::min<uint64_t>((next - now) / 1'000'000 + 1, 60'000)) : 0;
    }
    std::array<epoll_event, 4> events;
    (void)epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), limit_ms);
    if (!failed_) take_device_events();
    take_jobs();
    if (box_) box_->collect(take);
    next = do_timers(now_ns());
  }
  for (auto& [id, out] : outgoing_)
    if (out.met) {
      Datagram bye;
      bye.kind = DatagramKind::kBye;
      bye.connection = id;
      post(out.to, bye);
    }
  for (const uint64_t until = now_ns() + kFarewellNs; box_ && !box_->idle() && now_ns() < until;) box_->collect(take);
}

void Exchange::take_device_events() {
  ibv_async_event event{};
  while (!failed_ && device_.library().ibv_get_async_event(device_.context(), &event) == 0) {
    const bool ours = event.element.port_num == device_.port();
    const Status down{StatusCode::kRailDown, event.event_type};
    switch (event.event_type) {
      case IBV_EVENT_PORT_ERR:
      case IBV_EVENT_PORT_ACTIVE:
        if (!ours) break;
        link_down_ = event.event_type == IBV_EVENT_PORT_ERR;
        look_at_address();
        judge_rail(down);
        break;
      case IBV_EVENT_GID_CHANGE:
      case IBV_EVENT_LID_CHANGE:
      case IBV_EVENT_CLIENT_REREGISTER:
        if (!ours) break;
        look_at_address();
        judge_rail(down);
        break;
      case IBV_EVENT_DEVICE_FATAL:
      case IBV_EVENT_CQ_ERR:
      case IBV_EVENT_SRQ_ERR:
        failed_ = true;
        judge_rail(down);
        break;
      case IBV_EVENT_SRQ_LIMIT_REACHED: {
        News news;
        news.kind = NewsKind::kReceivesLow;
        handover_->post(std::move(news));
        break;
      }
      default: break;  // of queue pairs: their completions report the same
    }
    device_.library().ibv_ack_async_event(&event);
  }
}

// Peers know the rail by one GID and one LID. A port that lost them (a new DHCP lease, another subnet manager) cannot be reached by that
// address, so the rail is down until it is back. One that moved within the table is followed: new paths leave from the new index.
void Exchange::look_at_address() {
  address_gone_ = !device_.has_its_address();
  look_again_ns_ = address_gone_ ? now_ns() + kLookAgainNs : ~0ull;
  box_->forget_routes();
}

void Exchange::judge_rail(Status why) {
  const Trouble trouble = failed_         ? Trouble::kDevice
                          : link_down_    ? Trouble::kPort
                          : address_gone_ ? Trouble::kAddress
                                          : Trouble::kNone;
  const Trouble before = device_.trouble();
  if (trouble == before) return;
  device_.set_trouble(trouble);
  News news;
  news.status = why;
  news.kind = trouble == Trouble::kNone     ? NewsKind::kPortUp
              : trouble == Trouble::kDevice ? NewsKind::kDeviceFailed
                                            : NewsKind::kPortDown;
  if (trouble == Trouble::kNone)
    for (auto& [id, out] : outgoing_)
      if (out.asked != 0) out.next_try_ns = 0, out.gap_ns = 0;
  handover_->post(std::move(news));
}

void Exchange::take_jobs() {
  for (Job& job : handover_->jobs()) {
    switch (job.kind) {
      case JobKind::kConnect: {
        Outgoing& out = outgoing_[job.connection->id];
        out.connection = job.connection;
        out.to = job.connection->remote;
        if (outgoing_.size() > kMaxPeers)
          give_up(out, {StatusCode::kPeerRejected, ENOSPC});
        else
          begin(out, kAllLanes);
        break;
      }
      case JobKind::kRebuild: {
        job.old.qp.reset();
        const auto found = outgoing_.find(job.connection->id);
        if (found == outgoing_.end() || found->second.closing) break;
        if (found->second.asked == 0)
          begin(found->second, job.lanes);
        else
          found->second.wanted |= job.lanes;
        break;
      }
      case JobKind::kClose: {
        const auto found = outgoing_.find(job.id);
        if (found == outgoing_.end()) break;
        Outgoing& out = found->second;
        out.closing = true;
        out.asked = out.wanted = 0;
        out.asking.clear();
        out.next_ask_ns = ~0ull;
        for (QueuePair& pair : out.pairs) pair.qp.reset();
        out.next_try_ns = out.gap_ns = 0;
        break;
      }
      case JobKind::kForgotten: retiring_.erase(job.qpn); break;
      case JobKind::kShutOut: shut_out(job.id); break;
      case JobKind::kWreck: bury(job); break;
      case JobKind::kAskKey:
        if (const auto found = outgoing_.find(job.connection->id); found != outgoing_.end() && !found->second.closing) {
          found->second.asking.push_back(job.key);
          found->second.next_ask_ns = 0;
        }
        break;
    }
  }
}

uint64_t Exchange::do_timers(uint64_t now) {
  if (now >= open_at_ns_) try_to_open(now);
  if (now >= look_again_ns_) {
    look_at_address();
    judge_rail({StatusCode::kRailDown, IBV_EVENT_GID_CHANGE});
  }
  uint64_t next = std::min(look_again_ns_, open_at_ns_);
  send_moved(now, &next);
  for (auto at = outgoing_.begin(); at != outgoing_.end();) {
    Outgoing& out = at->second;
    if (!out.closing && !out.met && now >= out.connection->connect_until_ns) give_up(out, StatusCode::kPeerUnreachable);
    if (now >= out.next_try_ns) try_again(out, now);
    if (now >= out.next_ask_ns) ask_keys(out, now);
    if (out.closing && (out.byes > kByes || failed_)) {
      at = outgoing_.erase(at);
      continue;
    }
    next = std::min({next, out.next_try_ns, out.next_ask_ns});
    if (!out.met && !out.closing) next = std::min(next, out.connection->connect_until_ns);
    ++at;
  }
  return next;
}

void Exchange::begin(Outgoing& out, uint8_t lanes) {
  out.asked = lanes;
  out.wanted = static_cast<uint8_t>(out.wanted & ~lanes);
  ++out.attempt;
  if (failed_) return;  // when the device is open again
  out.next_try_ns = out.gap_ns = 0;
  if (const Status status = build(out, lanes); !status.ok()) give_up(out, status);
}

// Our own ends, so that their numbers are known. They go on when the answer names the others.
Status Exchange::build(Outgoing& out, uint8_t lanes) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    QueueSizes wanted;
    wanted.sends = lane == kBulkLane ? device_.options().depth : std::min(kSignalDepth, device_.options().depth);
    wanted.receives = lane == kSignalLane ? kCreditReceives : 0;
    wanted.inline_bytes = kInlineBytes;
    out.pairs[lane] = {};
    if (const Status status = make_queue_pair(device_, queues_->cq.get(), nullptr, wanted, &out.pairs[lane]);
        !status.ok())
      return status;
  }
  return {};
}

void Exchange::try_again(Outgoing& out, uint64_t now) {
  out.gap_ns = out.gap_ns == 0 ? kFirstGapNs : std::min(out.gap_ns * 2, kLongestGapNs);
  out.next_try_ns = now + out.gap_ns;
  Datagram datagram;
  datagram.connection = out.connection->id;
  if (out.closing) {
    datagram.kind = DatagramKind::kBye;
    ++out.byes;
  } else if (out.asked != 0) {
    datagram.attempt = out.attempt;
    datagram.lanes = out.asked;
    for (size_t lane = 0; lane < kLanes; ++lane)
      if (out.pairs[lane].qp) datagram.ends[lane] = {out.pairs[lane].qp->qp_num, out.pairs[lane].psn};
  } else {
    out.next_try_ns = ~0ull;
    return;
  }
  post(out.to, datagram);
}

void Exchange::take_reply(const Datagram& reply) {
  const auto found = outgoing_.find(reply.connection);
  if (found == outgoing_.end()) return;
  Outgoing& out = found->second;
  if (reply.kind == DatagramKind::kByeReply) {
    if (out.closing) outgoing_.erase(found);
    return;
  }
  // An answer that came twice or too late, or out of an earlier life.
  if (failed_ || out.asked == 0 || reply.attempt != out.attempt || reply.sender.life != out.to.life) return;
  if (reply.kind == DatagramKind::kRefusal) {
    give_up(out, {reply.code == ESTALE ? StatusCode::kPeerDead : StatusCode::kPeerRejected, reply.code});
    return;
  }
  if (reply.lanes != out.asked) return;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if ((out.asked >> lane & 1) == 0) continue;
    Status status = ready_to_receive(device_, out.pairs[lane], out.to, reply.ends[lane]);
    if (status.ok()) status = ready_to_send(device_, out.pairs[lane]);
    if (status.ok()) continue;
    give_up(out, status);
    return;
  }
  News news;
  news.kind = NewsKind::kReady;
  news.connection = out.connection;
  news.lanes = out.asked;
  news.credits = reply.credits;
  news.life = reply.sender.life;
  for (size_t lane = 0; lane < kLanes; ++lane) news.pairs[lane] = std::exchange(out.pairs[lane], {});
  out.met = true;
  out.asked = 0;
  out.next_try_ns = ~0ull;
  handover_->post(std::move(news));
  if (out.wanted != 0) begin(out, out.wanted);
}

void Exchange::give_up(Outgoing& out, Status status) {
  News news;
  news.kind = NewsKind::kGivenUp;
  news.connection = out.connection;
  news.status = status;
  handover_->post(std::move(news));
  out.asked = out.wanted = 0;
  for (QueuePair& pair : out.pairs) pair.qp.reset();
  out.closing = true;  // they may have built their ends: notify them
  out.next_try_ns = out.gap_ns = 0;
}

// The peer's device was opened again. What we sent to the old one nobody knows of: the lock's holder ends it as for lanes that broke.
void Exchange::take_moved(const Datagram& moved) {
  const auto found = outgoing_.find(moved.connection);
  if (found == outgoing_.end() || found->second.closing) return;
  Outgoing& out = found->second;
  if (moved.sender.incarnation != out.to.incarnation || moved.sender.ethernet != out.to.ethernet) return;
  if (moved.sender.life <= out.to.life) return;  // sent again: our request answers it
  out.to = moved.sender;
  if (out.asked != 0) out.next_try_ns = out.gap_ns = 0;
  if (!out.asking.empty()) out.next_ask_ns = 0;
  News news;
  news.kind = NewsKind::kPeerMoved;
  news.connection = out.connection;
  handover_->post(std::move(news));
}

void Exchange::ask_keys(Outgoing& out, uint64_t now) {
  out.next_ask_ns = out.asking.empty() ? ~0ull : now + kAskAgainNs;
  for (const auto& key : out.asking) {
    Datagram question;
    question.kind = DatagramKind::kAskKey;
    question.connection = out.connection->id;
    question.key = key->id;
    post(out.to, question);
  }
}

void Exchange::take_number(const Datagram& reply) {
  const auto found = outgoing_.find(reply.connection);
  if (found == outgoing_.end() || reply.sender.life != found->second.to.life) return;
  std::erase_if(found->second.asking, [&](const auto& key) {
    if (key->id != reply.key) return false;
    key->newest.store(KeyNumber::pack(reply.sender.life, reply.number), std::memory_order_release);
    key->gone.store(reply.code == 0, std::memory_order_release);
    key->asked.store(false, std::memory_order_release);
    return true;
  });
}

void Exchange::post(const RailAddress& to, Datagram datagram) {
  datagram.target = to.incarnation;
  datagram.sender = address_;
  if (box_) (void)box_->send(to, encode(datagram));
}

}  // namespace asyncfabric::verbs

// fence.cc: when may memory be given back? Over sockets libfabric checks a key when the head of a write arrives and then
// receives the rest in pieces, also after the key was revoked. A stream is in order, so: ask each sender that introduced itself,
// it answers behind everything that it wrote before, and when the answer is here no old write can be half-way (INV-2).
// A sender that does not answer in time leaves the memory quarantined; one whose process is gone is not waited for.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <utility>

#include "providers/libfabric/rail.h"

namespace asyncfabric::libfabric {
namespace {

constexpr auto kProbeEvery = std::chrono::milliseconds(20);
constexpr std::chrono::milliseconds kSettle{250};
constexpr int kProbeMs = 5;

// ECONNREFUSED when nobody listens at an endpoint's name. An address of this host is asked by trying to bind it: a connection that
// is opened and closed again would stay in the other process for good (`net` of libfabric 1.17 never closes it).
int probe(const std::string& name) {
  sockaddr_storage target{};
  if (name.size() > sizeof target) return EINVAL;
  std::memcpy(&target, name.data(), name.size());
  const int probe = ::socket(target.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (probe < 0) return errno;
  const auto* address = reinterpret_cast<const sockaddr*>(&target);
  const auto size = static_cast<socklen_t>(name.size());
  const int yes = 1;  // connections that are still closing do not count, only a listener does
  (void)setsockopt(probe, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  int error = ::bind(probe, address, size) == 0 ? ECONNREFUSED : errno;
  if (error == EADDRNOTAVAIL) {  // another host: only a connection can know
    error = ::connect(probe, address, size) == 0 ? 0 : errno;
    pollfd entry{probe, POLLOUT, 0};
    socklen_t bytes = sizeof error;
    if (error == EINPROGRESS && ::poll(&entry, 1, kProbeMs) > 0)
      (void)getsockopt(probe, SOL_SOCKET, SO_ERROR, &error, &bytes);
  }
  ::close(probe);
  return error;
}

std::string with_connection(uint64_t connection, const std::string& address) {
  std::string body(reinterpret_cast<const char*>(&connection), sizeof connection);
  return body + address;
}

}  // namespace

// A peer must know who may be writing to it before it can ask whether we are done.
Status LibfabricRail::introduce(PeerState& peer) {
  if (!device_->profile().fence_on_release) return StatusCode::kOk;
  return send_control(peer, MessageKind::kIntroduce, peer.connection, address(), false);
}

Status LibfabricRail::fence(uint64_t patience_ns, uint64_t* number) {
  if (!device_->profile().fence_on_release) return StatusCode::kOk;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::nanoseconds(patience_ns);
  if (*number == 0) {
    *number = ++fence_number_;
    next_probe_ = Clock::now() + kProbeEvery;
    for (const InboundList::One& inbound : inbound_) (void)ask(inbound);
  }
  const uint64_t wanted = *number;
  while (inbound_.any_open(wanted)) {
    cover();  // who asks us may be in a fence too: no poll, no heartbeat, nothing else asks for the word that our answer waits for
    progress_into_stash();
    const Clock::time_point now = Clock::now();
    if (now >= next_probe_) {
      next_probe_ = now + kProbeEvery;
      for (InboundList::One& inbound : inbound_) {
        if (!InboundList::is_open(inbound, wanted)) continue;
        if (is_dead(inbound.sender))
          inbound.gone = true;
        else
          (void)ask(inbound);  // once more: the question or the answer may have been on a stream that broke
      }
    }
    if (now >= deadline) return StatusCode::kDrainTimeout;
    if (device_->wait_fd() >= 0 && prepare_wait()) {  // do not burn the core that the peer may need
      pollfd entry{device_->wait_fd(), POLLIN, 0};
      (void)::poll(&entry, 1, 1);
    }
  }
  // Streams of senders that are gone end with what the kernel still holds, at most its socket buffers: take it before the memory
  // goes. Passes alone show nothing (rxm reads little in each), so it is a time, several times what a loopback needs for them.
  if (inbound_.any_gone_lately(Clock::now()))
    for (const Clock::time_point settled = Clock::now() + kSettle; Clock::now() < settled;) progress_into_stash();
  inbound_.drop_gone();
  return StatusCode::kOk;
}

bool LibfabricRail::ask(const InboundList::One& inbound) {
  PeerState* path = path_to(inbound.sender);
  if (path == nullptr) return false;
  return send_control(*path, MessageKind::kFenceAsk, fence_number_, with_connection(inbound.connection, address()),
                      false)
      .ok();
}

PeerState* LibfabricRail::path_to(const RailAddress& address) {
  for (const std::shared_ptr<PeerState>& peer : peers_)
    if (!peer->closed && peer->remote.name == address.name) return peer.get();
  std::shared_ptr<PeerState> opened;
  return open_peer(address, &opened).ok() ? opened.get() : nullptr;
}

bool LibfabricRail::is_dead(const RailAddress& sender) {
  if (!refuses_connections(sender)) return false;
  dead_.push_back(sender.name);
  return true;
}

// What we opened to ask them: its questions would wait for ever, and with them a descriptor. At the end of a pass, like rebuild_broken().
void LibfabricRail::close_paths_to_dead() {
  for (const std::string& name : std::exchange(dead_, {}))
    for (size_t i = 0; i < peers_.size(); ++i) {
      PeerState& peer = *peers_[i];
      if (peer.handle != nullptr || peer.closed || peer.remote.name != name) continue;
      peer.lost = true;
      (void)flush(peer);
    }
}

void LibfabricRail::enter_inbound(uint64_t connection, RailAddress sender) {
  if (!inbound_.add(connection, std::move(sender))) return;
  inbound_.look_after(
      InboundList::Clock::now(), [this](const InboundList::One& one) { (void)ask(one); },
      [this](const RailAddress& other) { return is_dead(other); });
}

void LibfabricRail::take_control_message(const MessageHead& head, std::string_view body) {
  if (!device_->profile().fence_on_release) return;
  if (head.kind == MessageKind::kIntroduce) {
    RailAddress sender;
    if (!parse(body, &sender)) return;
    if (admitted_.takes(connection_tag(head.number)))
      enter_inbound(head.number, std::move(sender));
    else
      admitted_.keep(head.number, std::move(sender));
    return;
  }
  uint64_t connection = 0;
  if (body.size() < sizeof connection) return;
  std::memcpy(&connection, body.data(), sizeof connection);
  body.remove_prefix(sizeof connection);
  if (head.kind != MessageKind::kFenceAsk) {
    inbound_.answer(connection, head.number, head.kind == MessageKind::kFenceGone);
    return;
  }
  for (const std::shared_ptr<PeerState>& peer : peers_) {
    if (peer->closed || peer->connection != connection) continue;
    (void)send_control(*peer, MessageKind::kFenceAnswer, head.number, with_connection(connection, ""), true);
    return;
  }
  RailAddress asker;  // we closed that connection: what it carried has left or never will
  if (!parse(body, &asker) || (admitted_.required() && !admitted_.is_own(connection))) return;
  if (PeerState* path = path_to(asker))
    (void)send_control(*path, MessageKind::kFenceGone, head.number, with_connection(connection, ""), false);
}

// Nobody listens there any more: the rail is closed or its process is gone, and with it all of its connections. A process that is
// being killed loses its sockets one after the other, hence the second try.
bool LibfabricRail::refuses_connections(const RailAddress& address) const {
  if (nobody_listens(address)) return true;
  const timespec pause{0, 1'000'000};
  (void)nanosleep(&pause, nullptr);
  return nobody_listens(address);
}

// The kernel may give the port of one that is gone to an endpoint that we have opened since, such as one to ask it: that takes questions and
// answers none. While the peer lived it would not have got the port.
bool LibfabricRail::nobody_listens(const RailAddress& address) const {
  if (probe(address.name) == ECONNREFUSED) return true;
  return std::any_of(peers_.begin(), peers_.end(), [&](const std::shared_ptr<PeerState>& peer) {
    std::string name;
    return peer->own_endpoint != nullptr && Device::name_of(*peer->own_endpoint, &name) == 0 && name == address.name;
  });
}

}  // namespace asyncfabric::libfabric

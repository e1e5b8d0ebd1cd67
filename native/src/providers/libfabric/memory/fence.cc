// fence.cc: when may memory be given back? Over sockets libfabric checks a key when the head of a write arrives and then
// receives the rest in pieces, also after the key was revoked. A stream is in order, so: ask each sender that introduced itself,
// it answers behind everything that it wrote before, and when the answer is here no old write can be half-way (INV-2).
// A sender whose process is gone is not waited for, nor one that stands still for long: its stream is ended from here, and it opens another
// when it goes on. Such a one is done with when all streams that are left belong to senders that have answered. For this each names its end of
// its stream; where that cannot be known, one that does not answer in time leaves the memory quarantined.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <iterator>
#include <string_view>
#include <utility>

#include "providers/libfabric/rail.h"

namespace asyncfabric::libfabric {
namespace {

constexpr auto kProbeEvery = std::chrono::milliseconds(20);
// How long nothing may come of a sender that was asked before its stream is ended: over a network packets are lost and sent again.
constexpr std::chrono::milliseconds kStandsStillOnHost{1'000}, kStandsStillOnNetwork{4'000};
constexpr std::chrono::milliseconds kShutOutStandsStill{200};  // one that the engine has lost
constexpr std::chrono::milliseconds kSettle{250};
constexpr int kProbeMs = 5;

// A socket for asking who listens at an endpoint's name, which `target` gets.
int probing_socket(const std::string& name, sockaddr_storage* target) {
  *target = {};
  if (name.size() > sizeof *target) return -1;
  std::memcpy(target, name.data(), name.size());
  return ::socket(target->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

// Nobody listens at this address of this host: asked by trying to bind it, since a connection that is opened and closed again would stay in
// the other process for good (`net` of libfabric 1.17 never closes it). `elsewhere`: it is another host's, and a connection has to be opened.
bool is_free_here(const std::string& name, bool* elsewhere = nullptr) {
  sockaddr_storage target;
  const int probe = probing_socket(name, &target);
  const int yes = 1;  // connections that are still closing do not count, only a listener does
  (void)setsockopt(probe, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  const int error =
      ::bind(probe, reinterpret_cast<const sockaddr*>(&target), static_cast<socklen_t>(name.size())) == 0 ? 0 : errno;
  ::close(probe);
  if (elsewhere != nullptr) *elsewhere = error == EADDRNOTAVAIL;
  return error == 0;
}

bool refuses(const std::string& name) {
  bool elsewhere = false;
  if (is_free_here(name, &elsewhere)) return true;
  if (!elsewhere) return false;
  sockaddr_storage target;
  const int probe = probing_socket(name, &target);
  const auto size = static_cast<socklen_t>(name.size());
  int error = ::connect(probe, reinterpret_cast<const sockaddr*>(&target), size) == 0 ? 0 : errno;
  pollfd entry{probe, POLLOUT, 0};
  socklen_t bytes = sizeof error;
  if (error == EINPROGRESS && ::poll(&entry, 1, kProbeMs) > 0)
    (void)getsockopt(probe, SOL_SOCKET, SO_ERROR, &error, &bytes);
  ::close(probe);
  return error == ECONNREFUSED;
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

// Behind the word that all before it has arrived. name_stream() adds our end of the stream.
Status LibfabricRail::send_answer(PeerState& peer, uint64_t number) {
  return send_control(peer, MessageKind::kFenceAnswer, number, with_connection(peer.connection, ""), true);
}

// Called when an answer can leave, so the stream is there. Another rail of this process may have one to the same place: then neither is named.
void LibfabricRail::name_stream(Context& context) {
  PeerState& peer = *context.peer;
  if (!is_there(peer.stream)) {
    std::vector<Stream> found = find_streams("", peer.remote.name).value_or(std::vector<Stream>());
    std::erase_if(found, [&](const Stream& one) {
      return std::any_of(peers_.begin(), peers_.end(),
                         [&](const auto& other) { return other.get() != &peer && other->stream.near == one.near; });
    });
    peer.stream = found.size() == 1 ? found.front() : Stream();
  }
  const std::string& name = peer.stream.near;
  std::memcpy(context.payload + kMessageHeadBytes + sizeof peer.connection, name.data(), name.size());
  context.request.length = sizeof peer.connection + name.size();
}

Status LibfabricRail::fence(uint64_t patience_ns, uint64_t* number) {
  if (!device_->profile().fence_on_release) return StatusCode::kOk;
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::nanoseconds(patience_ns);
  if (*number == 0) {
    *number = ++fence_number_;
    next_probe_ = Clock::now() + kProbeEvery;
    for (InboundList::One& inbound : inbound_) (void)ask(inbound);
  }
  const uint64_t wanted = *number;
  while (inbound_.any_open(wanted)) {
    cover();  // who asks us may be in a fence too: no poll, no heartbeat, nothing else asks for the word that our answer waits for
    progress_into_stash();
    const Clock::time_point now = Clock::now();
    const bool due = now >= next_probe_;
    if ((due || inbound_.only_streamless_open(wanted)) && only_answered_streams_left(wanted, now)) {
      inbound_.conclude(wanted, [this](const RailAddress& sender) {
        silent_.insert(sender.name);
        return nobody_listens(sender);
      });
      break;
    }
    if (due) {
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
  any_spare_ = true;
  return StatusCode::kOk;
}

// Ends the streams on which nothing has come for long of those that have not answered, and of strangers: the next look finds them gone.
bool LibfabricRail::only_answered_streams_left(uint64_t wanted, std::chrono::steady_clock::time_point now) {
  const auto streams = find_streams(device_->endpoint_name(), "");
  if (!streams) return false;
  const auto claims = inbound_.claims(
      wanted, [this](const InboundList::One& one) { return shut_out_.holds(connection_tag(one.connection)); });
  const auto asked = inbound_.asked_since(wanted, now);
  bool others = false;
  for (const Stream& stream : *streams) {
    const auto claim = claims.find(stream.far);
    if (claim != claims.end() && claim->second.answered) continue;
    others = true;
    const bool shut_out = claim != claims.end() && claim->second.shut_out;
    const auto patience = shut_out              ? kShutOutStandsStill
                          : within_host(stream) ? kStandsStillOnHost
                                                : kStandsStillOnNetwork;
    StreamFacts facts;
    if (now >= asked + patience && look_at(stream.fd, &facts) && std::chrono::milliseconds(facts.silent_ms) >= patience)
      (void)::shutdown(stream.fd, SHUT_RDWR);  // libfabric closes it when it reads its end
  }
  return !others;
}

bool LibfabricRail::ask(InboundList::One& inbound) {
  if (inbound.asked == InboundList::Clock::time_point{}) inbound.asked = InboundList::Clock::now();
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
  silent_.insert(sender.name);
  return true;
}

// Connections that we opened to ask or to answer somebody go once they have carried all that they should, unless there is somebody to be asked
// again. Where nobody answered they go at once: a question would wait there for ever, and with it a descriptor. At the end of a pass, like
// rebuild_broken().
void LibfabricRail::close_spare_paths() {
  if (!has_spare_paths()) return;
  any_spare_ = false;
  const std::unordered_set<std::string> silent = std::exchange(silent_, {});
  std::unordered_set<std::string_view> senders;
  for (const InboundList::One& inbound : inbound_) senders.insert(inbound.sender.name);
  std::vector<std::shared_ptr<PeerState>> spare;
  std::copy_if(peers_.begin(), peers_.end(), std::back_inserter(spare), [&](const auto& peer) {
    if (peer->handle != nullptr || peer->closed) return false;
    return silent.contains(peer->remote.name) || (peer->requests.empty() && !senders.contains(peer->remote.name));
  });
  for (const std::shared_ptr<PeerState>& peer : spare) {  // flush() reads the CQ: a message there may open a connection
    peer->lost = true;
    (void)flush(*peer);
  }
}

void LibfabricRail::enter_inbound(uint64_t connection, RailAddress sender) {
  if (!inbound_.add(connection, std::move(sender))) return;
  const size_t before = inbound_.size();
  inbound_.look_after(
      InboundList::Clock::now(),
      [this](InboundList::One& one) {
        one.gone = is_free_here(one.sender.name);
        if (one.gone)
          silent_.insert(one.sender.name);
        else
          (void)ask(one);  // for which a connection may be opened
      },
      [this](const RailAddress& other) { return is_dead(other); });
  any_spare_ |= inbound_.size() < before;
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
    const bool gone = head.kind == MessageKind::kFenceGone;
    inbound_.answer(connection, head.number, gone, gone || body.size() > kMaxNameBytes ? std::string_view() : body);
    return;
  }
  for (const std::shared_ptr<PeerState>& peer : peers_) {
    if (peer->closed || peer->connection != connection) continue;
    (void)send_answer(*peer, head.number);
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
  if (refuses(address.name)) return true;
  return std::any_of(peers_.begin(), peers_.end(), [&](const std::shared_ptr<PeerState>& peer) {
    return peer->own_endpoint != nullptr && peer->own_name == address.name;
  });
}

}  // namespace asyncfabric::libfabric

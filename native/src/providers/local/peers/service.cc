// service.cc: see service.h.
#include "providers/local/peers/service.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <algorithm>
#include <bit>
#include <ctime>

#include "base/clock.h"
#include "base/descriptor_room.h"
#include "base/start_thread.h"

namespace asyncfabric::local {
namespace {

// An epoll tag is (kind, id).
enum class TagKind : uint64_t { kListener = 1, kStop = 2, kSession = 3, kOutgoing = 4, kProcess = 5 };
constexpr int kKindShift = 56;
constexpr uint64_t tag_of(TagKind kind, uint64_t id) { return static_cast<uint64_t>(kind) << kKindShift | id; }

constexpr size_t kMaxStrangers = 64;  // of other users: each receives a refusal, but cannot take all seats
constexpr size_t kMaxSessions = kMaxConnections + kMaxStrangers;  // with some that are still in their handshake
constexpr size_t kMostUnadmitted = 128;  // sessions that have not proven the secret of a fabric which has one
constexpr uint64_t kUnadmittedNs = 2'000'000'000;
constexpr int kLookMs = 500;
constexpr long kOutOfDescriptorsNapNs = 20'000'000;

}  // namespace

Status Service::start(TracerPolicy policy, std::string* detail) {
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  stop_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !stop_) {
    *detail = std::string("local: no descriptors left (raise `ulimit -n`): ") + std::strerror(errno);
    return {StatusCode::kNoMemory, errno};
  }
  if (const Status status = listen_abstract(reception_.socket_name, &listener_); !status.ok()) {
    *detail = std::string("local: cannot listen on an abstract unix socket: ") + std::strerror(status.raw);
    return status;
  }
  neighbours_ = std::make_unique<Neighbours>(policy, [this](const ProcessWatch& process) {
    add(process.fd(), EPOLLIN | EPOLLONESHOT, tag_of(TagKind::kProcess, static_cast<uint64_t>(process.pid())));
  });
  add(listener_.get(), EPOLLIN, tag_of(TagKind::kListener, 0));
  add(stop_.get(), EPOLLIN, tag_of(TagKind::kStop, 0));
  // Signals belong to the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const Status started = start_thread([this] { run(); }, &thread_, detail);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!started.ok()) return started;
  pthread_setname_np(thread_.native_handle(), "af-local");
  return {};
}

void Service::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  look_after_kept();
  thread_.join();
  for (auto& [id, session] : sessions_) shutdown(session.fd(), SHUT_RDWR);
  sessions_.clear();
  listener_.reset();
}

void Service::look_after_kept() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t done = write(stop_.get(), &one, sizeof one);
}

void Service::watch(const Outgoing& link) {
  // ONESHOT: a hang-up is reported once; data on the socket belongs to the control thread.
  add(link.socket.get(), EPOLLRDHUP | EPOLLONESHOT, tag_of(TagKind::kOutgoing, link.serial));
}

bool Service::add(int fd, uint32_t events, uint64_t tag) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void Service::run() {
  epoll_event events[64];
  bool keeps = false;
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events, 64, keeps ? kLookMs : -1);
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[i].data.u64 & ((1ull << kKindShift) - 1);
      switch (static_cast<TagKind>(events[i].data.u64 >> kKindShift)) {
        case TagKind::kListener: accept_all(); break;
        case TagKind::kStop: {
          uint64_t rung = 0;
          [[maybe_unused]] const ssize_t taken = read(stop_.get(), &rung, sizeof rung);
          if (stopping_.load(std::memory_order_seq_cst)) return;
          break;
        }
        case TagKind::kSession: serve(id); break;
        case TagKind::kOutgoing: connections_.lose(id); break;
        case TagKind::kProcess: bury(static_cast<pid_t>(id)); break;
      }
    }
    // Nobody reports the end of a registration: while something is kept, it is looked for.
    keeps = kept_.prune();
    if (connections_.asks_admission()) keeps = end_unadmitted(now_ns()) || keeps;
  }
}

void Service::accept_all() {
  for (;;) {
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE) {
        make_descriptor_room(-1);
        const timespec nap{0, kOutOfDescriptorsNapNs};  // the listener stays readable: do not spin on it
        nanosleep(&nap, nullptr);
      }
      return;
    }
    make_descriptor_room(socket.get());
    // Abstract names have no owner: whoever is on this host may connect, and hold a session without a word.
    const size_t most = peer_credentials(socket.get()).same_user ? kMaxSessions : kMaxStrangers;
    if (sessions_.size() >= most) continue;
    const uint64_t id = next_session_++;
    if (!add(socket.get(), EPOLLIN, tag_of(TagKind::kSession, id))) continue;
    Session& session = sessions_[id];
    session.socket = std::move(socket);
    session.since_ns = now_ns();
  }
}

void Service::serve(uint64_t id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = found->second;
  for (;;) {
    WireMessage message;
    FdPack fds;
    Status status = receive_wire(session.fd(), &message, &fds);
    if (status.code == StatusCode::kBusy) return;
    if (status.code == StatusCode::kNoMemory && session.incoming == nullptr) refuse(session, status);
    if (status.ok()) {
      if (message.kind == WireKind::kHello && session.incoming == nullptr)
        status = greet(session, message, fds);
      else if (message.kind == WireKind::kShow && session.incoming != nullptr)
        status = show(session, message);
      else
        status = StatusCode::kPeerRejected;
    }
    if (!status.ok()) return end(found);
  }
}

Status Service::greet(Session& session, const WireMessage& hello, FdPack& fds) {
  const auto examine = [&](Incoming::Parts* parts) -> Status {
    const PeerCredentials peer = peer_credentials(session.socket.get());
    if (!peer.same_user || hello.target_rail != reception_.rail_id || !fds[0]) return StatusCode::kPeerRejected;
    if (!std::has_single_bit(hello.entries) || hello.entries < kMinEntries || hello.entries > kMaxEntries)
      return StatusCode::kPeerRejected;
    if (Status s = neighbours_->process(peer.pid, hello.process_start, &parts->process); !s.ok()) return s;
    parts->entries = hello.entries;
    const SegmentLayout layout(hello.entries);
    if (Status s = Mapping::open(FileRole::kSegment, fds[0].get(), layout.total(), &parts->segment); !s.ok()) return s;
    const auto* header = parts->segment->as<const SegmentHeader>();
    if (header->magic != kSegmentMagic || header->version != kLayoutVersion) return StatusCode::kPeerRejected;
    parts->segment->populate(layout.ring(), layout.staging() - layout.ring());
    return Doorbell::open(std::move(fds[2]), fds[1], peer.pid, waits_, &parts->producer);
  };
  Incoming::Parts parts;
  Status status = examine(&parts);
  if (status.ok() && !connections_.has_seat()) status = StatusCode::kPeerRejected;
  if (!status.ok()) return refuse(session, status);
  parts.socket = std::move(session.socket);
  session.incoming = connections_.seat(std::move(parts));
  if (session.incoming->process()->gone()) return StatusCode::kPeerDead;  // its pidfd may have spoken before
  WireMessage answer = wire_message(WireKind::kWelcome);
  answer.rail = reception_.rail_id;
  return send_wire(session.fd(), answer, {reception_.board_file.get(), -1, -1});
}

Status Service::refuse(const Session& session, Status why) const {
  WireMessage answer = wire_message(WireKind::kWelcome);
  answer.rail = reception_.rail_id;
  answer.status = static_cast<uint32_t>(why.code);
  answer.raw = static_cast<uint32_t>(why.raw);
  send_wire(session.fd(), answer, {-1, -1, -1});
  return why;
}

Status Service::show(const Session& session, const WireMessage& ask) const {
  WireMessage answer = wire_message(WireKind::kShown);
  answer.number = ask.number;
  UniqueFd file;
  Shown shown;
  Status status = StatusCode::kAccessDenied;
  if (ask.slot >= kMaxRegions)
    status = StatusCode::kInvalidArgument;
  else if (session.incoming->admitted())
    status = regions_.show({ask.slot, ask.word}, ask.part, &shown, &file);
  answer.status = static_cast<uint32_t>(status.code);
  answer.raw = static_cast<uint32_t>(status.raw);
  if (status.ok()) {
    answer.mark = shown.mark;
    answer.life = shown.life;
    answer.base = shown.base;
    answer.length = shown.length;
    answer.traits = shown.traits;
  }
  return send_wire(session.fd(), answer, {file.get(), -1, -1});
}

void Service::end(Sessions::iterator session) {
  const int fd = session->second.fd();
  if (fd >= 0) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    shutdown(fd, SHUT_RDWR);
  }
  if (session->second.incoming != nullptr) connections_.leave(std::move(session->second.incoming));
  sessions_.erase(session);
}

// A stranger must not keep seats that peers need. Whoever has the secret proves it within a few milliseconds.
bool Service::end_unadmitted(uint64_t now) {
  const auto admitted = [](const Session& session) {
    return session.incoming != nullptr && session.incoming->admitted();
  };
  size_t waiting = static_cast<size_t>(
      std::count_if(sessions_.begin(), sessions_.end(), [&](const auto& entry) { return !admitted(entry.second); }));
  for (auto next = sessions_.begin(); next != sessions_.end() && waiting != 0;) {
    const auto session = next++;  // the oldest first
    if (admitted(session->second)) continue;
    if (waiting <= kMostUnadmitted && now - session->second.since_ns < kUnadmittedNs) break;
    end(session);
    --waiting;
  }
  return waiting != 0;
}

void Service::bury(pid_t pid) {
  const std::shared_ptr<ProcessWatch> process = neighbours_->find(pid);
  if (process == nullptr || !process->gone()) return;
  for (auto next = sessions_.begin(); next != sessions_.end();) {
    const auto session = next++;
    if (session->second.incoming != nullptr && session->second.incoming->process() == process.get()) end(session);
  }
  connections_.lose_process(process.get());
}

}  // namespace asyncfabric::local

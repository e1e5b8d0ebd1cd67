// wire.cc: see wire.h.
#include "providers/local/peers/wire.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>

#include <algorithm>

#include "base/clock.h"
#include "providers/local/memory/segment.h"

namespace asyncfabric::local {
namespace {

constexpr uint32_t kWireMagic = 0x4c574641;  // "AFWL"
constexpr int kBacklog = 4096;               // the kernel cuts it to net.core.somaxconn
constexpr uint64_t kSecondNs = 1'000'000'000;
constexpr uint64_t kLongestWaitNs = 60 * kSecondNs;

socklen_t abstract_name(const std::string& name, sockaddr_un* out) {
  *out = {};
  out->sun_family = AF_UNIX;
  std::memcpy(out->sun_path + 1, name.data(), std::min(name.size(), sizeof out->sun_path - 1));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

UniqueFd seqpacket(int flags) { return UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0)); }

}  // namespace

WireMessage wire_message(WireKind kind) {
  WireMessage message;
  message.magic = kWireMagic;
  message.kind = kind;
  message.version = kLayoutVersion;
  return message;
}

Status send_wire(int socket, const WireMessage& message, std::array<int, kMaxFds> fds) {
  WireMessage out = message;
  out.fds = 0;
  while (out.fds < kMaxFds && fds[out.fds] >= 0) ++out.fds;
  iovec body{&out, sizeof out};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  msghdr header{};
  header.msg_iov = &body;
  header.msg_iovlen = 1;
  if (out.fds > 0) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * out.fds);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * out.fds);
    std::memcpy(CMSG_DATA(rights), fds.data(), sizeof(int) * out.fds);
  }
  while (sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return {StatusCode::kBusy, errno};
    return {StatusCode::kPeerDead, errno};
  }
  return {};
}

Status receive_wire(int socket, WireMessage* message, FdPack* fds) {
  iovec body{message, sizeof *message};
  // Room for more descriptors than any message has: surplus ones are received and closed, not leaked.
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * (kMaxFds + 1))] = {};
  msghdr header{};
  header.msg_iov = &body;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t got = 0;
  while ((got = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) return {StatusCode::kBusy, errno};
    return {StatusCode::kPeerDead, errno};
  }
  uint32_t count = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t in_part = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < in_part; ++i, ++count) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      UniqueFd owned(fd);
      if (count < kMaxFds) (*fds)[count] = std::move(owned);
    }
  }
  if (got == 0) return StatusCode::kPeerDead;
  if ((header.msg_flags & MSG_TRUNC) != 0 || got != sizeof *message || message->magic != kWireMagic ||
      message->version != kLayoutVersion || message->fds > kMaxFds)
    return StatusCode::kPeerRejected;
  if ((header.msg_flags & MSG_CTRUNC) != 0 && count < message->fds) return {StatusCode::kNoMemory, EMFILE};
  return message->fds == count ? Status() : Status(StatusCode::kPeerRejected);
}

Status await_wire(int socket, WireKind kind, uint64_t deadline_ns, WireMessage* message, FdPack* fds) {
  for (;;) {
    const Status status = receive_wire(socket, message, fds);
    if (status.ok()) return message->kind == kind ? status : Status(StatusCode::kPeerRejected);
    if (status.code != StatusCode::kBusy) return status;
    const uint64_t now = now_ns();
    if (now >= deadline_ns) return StatusCode::kTimeout;
    pollfd waiting{socket, POLLIN, 0};
    const uint64_t left = std::min(deadline_ns - now, kLongestWaitNs);
    const timespec limit{static_cast<time_t>(left / kSecondNs), static_cast<long>(left % kSecondNs)};
    ppoll(&waiting, 1, &limit, nullptr);
  }
}

Status listen_abstract(const std::string& name, UniqueFd* out) {
  UniqueFd fd = seqpacket(SOCK_NONBLOCK);
  if (!fd) return {StatusCode::kNoMemory, errno};
  sockaddr_un address;
  const socklen_t length = abstract_name(name, &address);
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 || listen(fd.get(), kBacklog) != 0)
    return {StatusCode::kTransport, errno};
  *out = std::move(fd);
  return {};
}

Status connect_abstract(const std::string& name, uint64_t deadline_ns, UniqueFd* out) {
  UniqueFd fd = seqpacket(SOCK_NONBLOCK);
  if (!fd) return {StatusCode::kNoMemory, errno};
  sockaddr_un address;
  const socklen_t length = abstract_name(name, &address);
  const timespec pause{0, 100'000};  // nothing shows when a listener has room again
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno != EINTR && errno != EAGAIN) return {StatusCode::kPeerUnreachable, errno};
    if (now_ns() >= deadline_ns) return {StatusCode::kBusy, errno};
    (void)nanosleep(&pause, nullptr);
  }
  *out = std::move(fd);
  return {};
}

PeerCredentials peer_credentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return {};
  return {credentials.pid, credentials.uid == geteuid()};
}

}  // namespace asyncfabric::local

// half_open.cc: see half_open.h.
#include "providers/libfabric/peers/half_open.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/clock.h"
#include "providers/libfabric/peers/orphans.h"

namespace asyncfabric::libfabric {
namespace {

// What opens a connection of libfabric's `net`; who means it sends an introduction behind it at once.
constexpr uint64_t kRequestBytes = 40;

// The head of the kernel's tcp_info as of Linux 4.1, which the C library's does not reach.
struct TcpFacts {
  tcp_info known;
  uint64_t pacing_rate, max_pacing_rate, bytes_acked, bytes_received;
};
static_assert(offsetof(TcpFacts, bytes_received) == 128);

struct Silent {
  int fd;
  uint32_t silent_ms;
};

std::vector<Silent> silent_connections(const std::string& name) {
  std::vector<Silent> found;
  for (const int fd : connections_to(name)) {
    TcpFacts facts{};
    socklen_t size = sizeof facts;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &size) != 0 || size < sizeof facts) continue;
    if (facts.bytes_received <= kRequestBytes) found.push_back({fd, facts.known.tcpi_last_data_recv});
  }
  return found;
}

// Of this process; 0: this kernel counts none (before Linux 6.2).
size_t open_descriptors() {
  struct stat folder{};
  return stat("/proc/self/fd", &folder) == 0 ? static_cast<size_t>(folder.st_size) : 0;
}

}  // namespace

bool HalfOpen::look(const std::string& name) {
  const uint64_t now = now_ns();
  if (now < next_ns_) return crowded_;
  const size_t descriptors = open_descriptors();
  next_ns_ = now + (descriptors != 0 ? kEveryNs : kUncountedEveryNs);
  if (!crowded_ && descriptors != 0 && descriptors < descriptors_ + kNewDescriptors) {
    descriptors_ = std::min(descriptors_, descriptors);
    return false;
  }
  descriptors_ = descriptors;
  std::vector<Silent> silent = silent_connections(name);
  crowded_ = silent.size() > kMost;
  if (!crowded_) return false;
  std::sort(silent.begin(), silent.end(), [](const Silent& a, const Silent& b) { return a.silent_ms > b.silent_ms; });
  silent.resize(silent.size() - kMost);
  // libfabric closes them when it reads their end.
  for (const Silent& one : silent) shutdown(one.fd, SHUT_RDWR);
  return true;
}

}  // namespace asyncfabric::libfabric

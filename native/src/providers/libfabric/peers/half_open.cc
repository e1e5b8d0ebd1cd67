// half_open.cc: see half_open.h.
#include "providers/libfabric/peers/half_open.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "base/clock.h"
#include "base/unique_fd.h"
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

}  // namespace

void HalfOpen::look(const std::string& name) {
  const uint64_t now = now_ns();
  if (now < next_ns_) return;
  next_ns_ = now + kEveryNs;
  const auto lowest_free = [] { return UniqueFd(eventfd(0, EFD_CLOEXEC)).get(); };
  const int free_descriptor = lowest_free();  // none is left: -1
  if (free_descriptor >= 0 && free_descriptor < free_descriptor_ + kNewDescriptors) {
    free_descriptor_ = std::min(free_descriptor_, free_descriptor);
    return;
  }
  free_descriptor_ = free_descriptor;
  std::vector<Silent> silent = silent_connections(name);
  if (silent.size() <= kMost) return;
  std::sort(silent.begin(), silent.end(), [](const Silent& a, const Silent& b) { return a.silent_ms > b.silent_ms; });
  silent.resize(silent.size() - kMost);
  // libfabric closes them when it reads their end.
  for (const Silent& one : silent) shutdown(one.fd, SHUT_RDWR);
  free_descriptor_ = std::max(0, free_descriptor - static_cast<int>(silent.size()));
}

}  // namespace asyncfabric::libfabric

// half_open.cc: see half_open.h.
#include "providers/libfabric/peers/half_open.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "base/clock.h"
#include "providers/libfabric/peers/streams.h"

namespace asyncfabric::libfabric {
namespace {

// What opens a connection of libfabric's `net`; who means it sends an introduction behind it at once.
constexpr uint64_t kRequestBytes = 40;

struct Silent {
  int fd;
  uint32_t silent_ms;
  bool asked;  // it has sent the whole of what opens a connection, and belongs to an endpoint
  bool ended;  // by the other side
};

std::vector<Silent> silent_connections(const std::string& name) {
  std::vector<Silent> found;
  for (const int fd : connections_to(name)) {
    StreamFacts facts;
    if (look_at(fd, &facts) && facts.bytes_received <= kRequestBytes)
      found.push_back({fd, facts.silent_ms, facts.bytes_received == kRequestBytes, !facts.established});
  }
  return found;
}

// Of this process; 0: this kernel counts none (before Linux 6.2).
size_t open_descriptors() {
  struct stat folder{};
  return stat("/proc/self/fd", &folder) == 0 ? static_cast<size_t>(folder.st_size) : 0;
}

}  // namespace

// `net` of libfabric 1.17 takes a connection out of its polling before it reads the request, and drops it without closing it where the read is
// short and errno is still EAGAIN from some earlier call. Nothing names such a descriptor any more. One whose request is not there yet is named
// by the polling alone, which the kernel ends with it.
bool HalfOpen::look(const std::string& name, bool forgets, bool sleeps) {
  const uint64_t now = now_ns();
  const bool soon = now < next_ns_;
  if (soon && (crowded_ || !sleeps)) return crowded_;
  const size_t descriptors = open_descriptors();
  if (soon && descriptors < descriptors_ + kNewDescriptors) return false;
  next_ns_ = now + kEveryNs;
  const bool waits = looks_left_ != 0 && --looks_left_ != 0;
  if (!crowded_ && (waits || (!any_ && descriptors != 0)) && descriptors < descriptors_ + kNewDescriptors) {
    descriptors_ = std::min(descriptors_, descriptors);
    return false;
  }
  looks_left_ = kLooksOfSilent;
  descriptors_ = descriptors;
  std::vector<Silent> silent = silent_connections(name);
  any_ = !silent.empty();
  std::sort(silent.begin(), silent.end(), [](const Silent& a, const Silent& b) { return a.silent_ms > b.silent_ms; });
  const size_t surplus = silent.size() - std::min(silent.size(), kMost);
  crowded_ = surplus != 0;
  for (size_t i = 0; i < silent.size(); ++i) {
    const Silent& one = silent[i];
    if (forgets && !one.asked && (one.ended || i < surplus))
      ::close(one.fd);
    else if (i < surplus)
      shutdown(one.fd, SHUT_RDWR);  // libfabric closes it when it reads its end
  }
  return crowded_;
}

}  // namespace asyncfabric::libfabric

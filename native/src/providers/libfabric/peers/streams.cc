// streams.cc: see streams.h.
#include "providers/libfabric/peers/streams.h"

#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace asyncfabric::libfabric {
namespace {

// The kernel's tcp_info as of Linux 4.1, which the C library's may not reach: newer ones do.
struct TcpFacts {
  uint8_t known[104];
  uint64_t pacing_rate, max_pacing_rate, bytes_acked, bytes_received;
};
static_assert(offsetof(TcpFacts, bytes_received) == 128);

constexpr size_t kPortEnds = offsetof(sockaddr_in, sin_addr);
static_assert(kPortEnds == offsetof(sockaddr_in6, sin6_flowinfo));

bool end_of(int fd, int (*ask)(int, sockaddr*, socklen_t*), std::string* out) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (ask(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return false;
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return false;
  out->assign(reinterpret_cast<const char*>(&address), size);
  return true;
}

}  // namespace

std::optional<std::vector<Stream>> find_streams(const std::string& near, const std::string& far) {
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return std::nullopt;
  std::vector<Stream> found;
  while (const dirent* entry = readdir(directory)) {
    char* end = nullptr;
    Stream stream;
    stream.fd = static_cast<int>(std::strtol(entry->d_name, &end, 10));
    if (end == entry->d_name || *end != '\0' || !end_of(stream.fd, getsockname, &stream.near) ||
        (!near.empty() && stream.near != near) || !end_of(stream.fd, getpeername, &stream.far) ||
        (!far.empty() && stream.far != far))
      continue;
    found.push_back(std::move(stream));
  }
  closedir(directory);
  return found;
}

bool is_there(const Stream& stream) {
  std::string near, far;
  return stream.fd >= 0 && end_of(stream.fd, getsockname, &near) && end_of(stream.fd, getpeername, &far) &&
         near == stream.near && far == stream.far;
}

std::vector<int> connections_to(const std::string& name) {
  std::vector<int> found;
  for (const Stream& stream : find_streams(name, "").value_or(std::vector<Stream>())) found.push_back(stream.fd);
  return found;
}

bool within_host(const Stream& stream) {
  return stream.near.size() == stream.far.size() &&
         stream.near.compare(kPortEnds, std::string::npos, stream.far, kPortEnds, std::string::npos) == 0;
}

bool look_at(int fd, StreamFacts* out) {
  TcpFacts facts{};
  socklen_t size = sizeof facts;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &facts, &size) != 0 || size < sizeof facts) return false;
  out->bytes_received = facts.bytes_received;
  std::memcpy(&out->silent_ms, facts.known + offsetof(tcp_info, tcpi_last_data_recv), sizeof out->silent_ms);
  out->established = facts.known[offsetof(tcp_info, tcpi_state)] == TCP_ESTABLISHED;
  return true;
}

void close_orphans_of(const std::string& name) {
  for (const int fd : connections_to(name)) ::close(fd);
}

}  // namespace asyncfabric::libfabric

// orphans.cc: see orphans.h.
#include "providers/libfabric/peers/orphans.h"

#include <dirent.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace asyncfabric::libfabric {
namespace {

bool has_local_address(int fd, const std::string& name) {
  sockaddr_storage local{};
  socklen_t size = sizeof local;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0 && size == name.size() &&
         std::memcmp(&local, name.data(), size) == 0;
}

bool is_connected(int fd) {
  sockaddr_storage remote{};
  socklen_t size = sizeof remote;
  return getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &size) == 0;
}

}  // namespace

std::vector<int> connections_to(const std::string& name) {
  DIR* directory = opendir("/proc/self/fd");
  std::vector<int> found;
  if (directory == nullptr) return found;
  while (const dirent* entry = readdir(directory)) {
    char* end = nullptr;
    const int fd = static_cast<int>(std::strtol(entry->d_name, &end, 10));
    if (end != entry->d_name && *end == '\0' && has_local_address(fd, name) && is_connected(fd)) found.push_back(fd);
  }
  closedir(directory);
  return found;
}

void close_orphans_of(const std::string& name) {
  for (const int fd : connections_to(name)) ::close(fd);
}

}  // namespace asyncfabric::libfabric

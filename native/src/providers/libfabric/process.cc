// process.cc: see process.h. pidfds for live processes; /dev/shm is swept when a shm rail opens.
#include "providers/libfabric/process.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdint>

namespace asyncfabric::libfabric {
namespace {

constexpr std::string_view kScheme = "fi_shm://";
constexpr std::string_view kOurs = "asyncfabric_";

uint64_t pid_namespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

// "asyncfabric_<pid>_<namespace>_...": the pid, or 0 when the name is not ours or the pid means nothing here.
pid_t owner_of(std::string_view name) {
  if (!name.starts_with(kOurs)) return 0;
  name.remove_prefix(kOurs.size());
  pid_t pid = 0;
  uint64_t space = 0;
  const char* end = name.data() + name.size();
  const auto first = std::from_chars(name.data(), end, pid);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != '_') return 0;
  const auto second = std::from_chars(first.ptr + 1, end, space);
  if (second.ec != std::errc() || second.ptr == end || *second.ptr != '_') return 0;
  return space == pid_namespace() && pid > 0 ? pid : 0;
}

pid_t owner_of_endpoint(std::string_view name) {
  return name.starts_with(kScheme) ? owner_of(name.substr(kScheme.size())) : 0;
}

int open_pidfd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace

std::string make_shm_name() {
  uint32_t salt = 0;
  if (getrandom(&salt, sizeof salt, 0) != sizeof salt) salt = static_cast<uint32_t>(getpid());
  return std::string(kScheme) + std::string(kOurs) + std::to_string(getpid()) + "_" + std::to_string(pid_namespace()) +
         "_" + std::to_string(salt);
}

void sweep_shm_segments() {
  DIR* directory = opendir("/dev/shm");
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    const pid_t pid = owner_of(entry->d_name);
    if (pid != 0 && kill(pid, 0) != 0 && errno == ESRCH) (void)shm_unlink(("/" + std::string(entry->d_name)).c_str());
  }
  closedir(directory);
}

bool is_own_shm_name(std::string_view endpoint_name) { return owner_of_endpoint(endpoint_name) == getpid(); }

std::unique_ptr<ProcessWatch> ProcessWatch::open(std::string_view endpoint_name) {
  const pid_t pid = owner_of_endpoint(endpoint_name);
  if (pid == 0) return nullptr;
  const int pidfd = open_pidfd(pid);
  if (pidfd < 0 && errno != ESRCH) return nullptr;
  return std::unique_ptr<ProcessWatch>(new ProcessWatch(pidfd));  // -1: it is gone already
}

ProcessWatch::~ProcessWatch() {
  if (pidfd_ >= 0) close(pidfd_);
}

bool ProcessWatch::ended() const {
  if (pidfd_ < 0) return true;
  pollfd entry{pidfd_, POLLIN, 0};
  return poll(&entry, 1, 0) > 0;
}

}  // namespace asyncfabric::libfabric

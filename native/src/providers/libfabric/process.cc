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

#include "providers/libfabric/segment_request.h"

namespace asyncfabric::libfabric {
namespace {

constexpr std::string_view kScheme = "fi_shm://";
constexpr std::string_view kOurs = "asyncfabric_";

uint64_t pid_namespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

int open_pidfd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace

// "asyncfabric_<pid>_<namespace>_...": the pid, or 0 when the name is not ours or the pid means nothing here.
pid_t shm_owner(std::string_view name) {
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

std::string make_shm_name() {
  uint32_t salt = 0;
  if (getrandom(&salt, sizeof salt, 0) != sizeof salt) salt = static_cast<uint32_t>(getpid());
  return std::string(kScheme) + std::string(kOurs) + std::to_string(getpid()) + "_" + std::to_string(pid_namespace()) +
         "_" + std::to_string(salt);
}

namespace {

template <typename Wanted>
std::vector<std::string> find_segments(Wanted wanted) {
  std::vector<std::string> names;
  DIR* directory = opendir("/dev/shm");
  if (directory == nullptr) return names;
  while (const dirent* entry = readdir(directory))
    if (const pid_t pid = shm_owner(entry->d_name); pid != 0 && wanted(pid)) names.emplace_back(entry->d_name);
  closedir(directory);
  return names;
}

}  // namespace

std::vector<std::string> shm_segments_of(pid_t pid) {
  return find_segments([pid](pid_t owner) { return owner == pid; });
}

void sweep_shm_segments() {
  (void)sweep_left_behind();
  for (const std::string& name : find_segments([](pid_t owner) { return kill(owner, 0) != 0 && errno == ESRCH; })) {
    const auto segment = Segment::open(name);
    if (segment == nullptr || !has_unread_request(*segment)) (void)shm_unlink(("/" + name).c_str());
  }
}

std::string_view shm_segment_name(std::string_view endpoint_name) {
  if (!endpoint_name.starts_with(kScheme)) return {};
  std::string_view name = endpoint_name.substr(kScheme.size());
  name = name.substr(0, name.find('\0'));
  return name.starts_with(kOurs) ? name : std::string_view();
}

bool is_own_shm_name(std::string_view endpoint_name) { return shm_owner(shm_segment_name(endpoint_name)) == getpid(); }

std::unique_ptr<ProcessWatch> ProcessWatch::open(std::string_view endpoint_name) {
  const pid_t pid = shm_owner(shm_segment_name(endpoint_name));
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

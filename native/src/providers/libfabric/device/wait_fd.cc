// wait_fd.cc: mostly fi_control(FI_GETWAIT). The `net` provider of libfabric 1.17 hands out an epoll set of two: its progress
// set, and a mark that completions set and that its fi_trywait never takes back, so a worker would never sleep again. There we
// wait on the progress set alone. That misses nothing: completions are written only by our own calls into the library, and
// prepare_wait() reads the CQ before each sleep.
#include "providers/libfabric/device/wait_fd.h"

#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

namespace asyncfabric::libfabric {
namespace {

struct CloseFile {
  void operator()(FILE* file) const { std::fclose(file); }
};

constexpr uint32_t kFirstWithTrywait = FI_VERSION(1, 18);

bool is_epoll(int fd) {
  std::array<char, 64> target{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t size = readlink(link.c_str(), target.data(), target.size() - 1);
  return size > 0 && std::strcmp(target.data(), "anon_inode:[eventpoll]") == 0;
}

// The epoll set inside of an epoll set, or the outer one where there is none. One line for each member: "tfd: 7 events: ...".
int inner_epoll(int outer) {
  const std::string path = "/proc/self/fdinfo/" + std::to_string(outer);
  const std::unique_ptr<FILE, CloseFile> members(std::fopen(path.c_str(), "re"));
  std::array<char, 256> line{};
  while (members && std::fgets(line.data(), line.size(), members.get()) != nullptr) {
    int fd = -1;
    if (std::sscanf(line.data(), "tfd: %d", &fd) == 1 && is_epoll(fd)) return fd;
  }
  return outer;
}

}  // namespace

int find_wait_fd(const Library& library, const fi_info& info, fid_cq* cq) {
  int fd = -1;
  if (fi_control(&cq->fid, FI_GETWAIT, &fd) != 0) return -1;
  const bool marks_stay =
      std::strcmp(info.fabric_attr->prov_name, "net") == 0 && library.fi_version() < kFirstWithTrywait;
  return marks_stay ? inner_epoll(fd) : fd;
}

}  // namespace asyncfabric::libfabric

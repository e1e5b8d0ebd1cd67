// segment_room.cc: see segment_room.h. Sizes: libfabric 1.17, prov/shm, read off live segments.
#include "providers/libfabric/segment_room.h"

#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

#include "providers/libfabric/segment.h"

namespace asyncfabric::libfabric {
namespace {

constexpr const char* kFolder = "/dev/shm";
constexpr uint64_t kSegmentBytes = 16ull << 20;
constexpr uint64_t kAskedForCpu = 18ull << 20;  // libfabric's own look, before it offers the provider: rounded up

uint64_t room_bytes() {
  struct statvfs facts{};
  return statvfs(kFolder, &facts) == 0 ? static_cast<uint64_t>(facts.f_bavail) * facts.f_frsize : 0;
}

std::string room_in_words() {
  return std::string(kFolder) + " has room for " + std::to_string(room_bytes() >> 20) + " MiB";
}

// Where the kernel refuses copies between processes, bytes go through buffers in the segments. What it allows this process it may still
// refuse between two: Yama does.
bool goes_through_buffers() {
  uint64_t word = 0, copy = 0;
  const iovec from{&word, sizeof word}, to{&copy, sizeof copy};
  if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != sizeof word) return true;
  std::ifstream file("/proc/sys/kernel/yama/ptrace_scope");
  int scope = 0;
  return file >> scope && scope != 0;
}

}  // namespace

Status check_segment_room(std::string* detail) {
  if (room_bytes() >= kSegmentBytes) return {};
  *detail = "shm: " + room_in_words() + ", and each rail and each connection takes a segment of 16 MiB";
  return {StatusCode::kNoMemory, ENOSPC};
}

Status take_segment_room(fid_ep* endpoint, std::string* detail) {
  const std::unique_ptr<Segment> segment = Segment::of(endpoint);
  if (segment == nullptr) return {};  // another libfabric, whose layout is not known here
  const int error = segment->take_room(goes_through_buffers());
  if (error == 0) return {};
  *detail = "shm: " + room_in_words() + " and not for a segment";
  return {StatusCode::kNoMemory, error};
}

std::string why_no_segments() {
  const uint64_t asked = kAskedForCpu * static_cast<uint64_t>(sysconf(_SC_NPROCESSORS_ONLN));
  if (room_bytes() >= asked) return {};
  return "; " + room_in_words() + ", and libfabric asks for up to " + std::to_string(asked >> 20) +
         " MiB: 18 for each processor (docker --shm-size)";
}

}  // namespace asyncfabric::libfabric

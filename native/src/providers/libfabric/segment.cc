// segment.cc: see segment.h.
#include "providers/libfabric/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "providers/libfabric/process.h"
#include "providers/libfabric/wire.h"

namespace asyncfabric::libfabric {

std::unique_ptr<Segment> Segment::open(std::string_view name) {
  const int file = shm_open(("/" + std::string(name)).c_str(), O_RDWR | O_CLOEXEC, 0);
  if (file < 0) return nullptr;
  struct stat status{};
  const bool known = fstat(file, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(SegmentHead));
  const auto bytes = static_cast<size_t>(status.st_size);
  void* mapped = known ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (mapped == MAP_FAILED) return nullptr;
  auto* head = static_cast<SegmentHead*>(mapped);
  std::unique_ptr<Segment> segment(new Segment(name, head, bytes));
  const bool fits = head->peers_offset <= bytes && bytes - head->peers_offset >= kSegmentPeers * sizeof(SegmentPeer) &&
                    head->peers_offset % alignof(SegmentPeer) == 0 && head->name_offset < bytes &&
                    head->command_queue_offset <= bytes - sizeof(SegmentQueue) &&
                    head->command_queue_offset % alignof(SegmentQueue) == 0;
  if (head->version != SegmentHead::kVersion || head->pid != shm_owner(name) || !fits) return nullptr;
  return segment;
}

std::unique_ptr<Segment> Segment::of(fid_ep* endpoint) {
  char name[kMaxNameBytes] = {};
  size_t size = sizeof name;
  if (fi_getname(&endpoint->fid, name, &size) != 0) return nullptr;
  return open(shm_segment_name({name, strnlen(name, sizeof name)}));
}

Segment::~Segment() { munmap(head_, bytes_); }

std::span<SegmentPeer> Segment::peers() const {
  return {reinterpret_cast<SegmentPeer*>(reinterpret_cast<char*>(head_) + head_->peers_offset), kSegmentPeers};
}

bool Segment::queue_is_empty() const {
  const auto* queue =
      reinterpret_cast<const SegmentQueue*>(reinterpret_cast<const char*>(head_) + head_->command_queue_offset);
  return __atomic_load_n(&queue->put, __ATOMIC_ACQUIRE) == __atomic_load_n(&queue->taken, __ATOMIC_RELAXED);
}

int Segment::take_room(bool buffers_too) const {
  const int file = shm_open(("/" + name_).c_str(), O_RDWR | O_CLOEXEC, 0);
  if (file < 0) return errno;
  const auto bytes = static_cast<off_t>(bytes_);
  // The buffers lie between the pool of small messages and the table of peers.
  const auto begin = static_cast<off_t>(std::min<uint64_t>(head_->bounce_pool_offset, bytes_));
  const auto end = static_cast<off_t>(std::min<uint64_t>(head_->peers_offset, bytes_));
  int error = buffers_too || begin >= end ? posix_fallocate(file, 0, bytes) : posix_fallocate(file, 0, begin);
  if (error == 0 && !buffers_too && begin < end && end < bytes) error = posix_fallocate(file, end, bytes - end);
  close(file);
  return error;
}

void Segment::say_farewell() {
  __atomic_store_n(reinterpret_cast<char*>(head_) + head_->name_offset, '\0', __ATOMIC_RELEASE);
}

void Segment::unlink() const { (void)shm_unlink(("/" + name_).c_str()); }

bool said_farewell(const SegmentHead& head) {
  return __atomic_load_n(reinterpret_cast<const char*>(&head) + head.name_offset, __ATOMIC_ACQUIRE) == '\0';
}

}  // namespace asyncfabric::libfabric

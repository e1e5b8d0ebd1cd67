// segment_request.cc: see segment_request.h.
#include "providers/libfabric/segment_request.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <span>
#include <vector>

#include "providers/libfabric/process.h"
#include "providers/libfabric/segment_layout.h"
#include "providers/libfabric/wire.h"

namespace asyncfabric::libfabric {
namespace {

struct LeftBehind {
  std::mutex mutex;
  std::vector<std::unique_ptr<SegmentRequest>> segments;
  std::atomic<size_t> count{0};  // read without the mutex: by every rail, now and then
};

LeftBehind& left_behind() {
  static auto& only = *new LeftBehind();  // never destroyed: rails may close while the process exits
  return only;
}

bool exists(const std::string& segment) {
  const int file = shm_open(("/" + segment).c_str(), O_RDONLY | O_CLOEXEC, 0);
  if (file >= 0) close(file);
  return file >= 0 || errno != ENOENT;
}

// An endpoint that was closed took its queue along.
bool may_still_read(const SegmentPeer& peer) {
  const std::string_view name(peer.name, strnlen(peer.name, sizeof peer.name));
  const std::string segment(shm_segment_name(name));
  if (shm_owner(segment) == 0 || !exists(segment)) return false;
  const auto process = ProcessWatch::open(name);
  return process == nullptr || !process->ended();
}

}  // namespace

std::unique_ptr<SegmentRequest> SegmentRequest::open(std::string_view segment) {
  const int file = shm_open(("/" + std::string(segment)).c_str(), O_RDWR | O_CLOEXEC, 0);
  if (file < 0) return nullptr;
  struct stat status{};
  const bool known = fstat(file, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(SegmentHead));
  const auto bytes = static_cast<size_t>(status.st_size);
  void* mapped = known ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  close(file);
  if (mapped == MAP_FAILED) return nullptr;
  auto* head = static_cast<SegmentHead*>(mapped);
  std::unique_ptr<SegmentRequest> request(new SegmentRequest(segment, head, bytes));
  const bool fits = head->peers_offset <= bytes && bytes - head->peers_offset >= kSegmentPeers * sizeof(SegmentPeer) &&
                    head->peers_offset % alignof(SegmentPeer) == 0 && head->name_offset < bytes;
  if (head->version != SegmentHead::kVersion || head->pid != shm_owner(segment) || !fits) return nullptr;
  return request;
}

std::unique_ptr<SegmentRequest> SegmentRequest::of(fid_ep* endpoint) {
  char name[kMaxNameBytes] = {};
  size_t size = sizeof name;
  if (fi_getname(&endpoint->fid, name, &size) != 0) return nullptr;
  return open(shm_segment_name({name, strnlen(name, sizeof name)}));
}

SegmentRequest::~SegmentRequest() { munmap(head_, bytes_); }

bool SegmentRequest::unread() const {
  const auto* first = reinterpret_cast<const SegmentPeer*>(reinterpret_cast<const char*>(head_) + head_->peers_offset);
  const std::span<const SegmentPeer> peers(first, kSegmentPeers);
  return std::any_of(peers.begin(), peers.end(), [](const SegmentPeer& peer) {
    return __atomic_load_n(&peer.asked, __ATOMIC_RELAXED) != 0 && __atomic_load_n(&peer.number, __ATOMIC_ACQUIRE) < 0 &&
           may_still_read(peer);
  });
}

// libfabric unlinks by the name that the segment itself carries.
void SegmentRequest::outlive_its_endpoint() { reinterpret_cast<char*>(head_)[head_->name_offset] = '\0'; }

void SegmentRequest::remove() const { (void)shm_unlink(("/" + segment_).c_str()); }

void close_shm_endpoint(EndpointPtr& endpoint) {
  if (endpoint == nullptr) return;
  std::unique_ptr<SegmentRequest> request = SegmentRequest::of(endpoint.get());
  const bool stays = request != nullptr && request->unread();
  if (stays) request->outlive_its_endpoint();
  endpoint.reset();
  if (!stays) return;
  LeftBehind& place = left_behind();
  const std::lock_guard lock(place.mutex);
  place.segments.push_back(std::move(request));
  place.count.store(place.segments.size());
}

size_t sweep_left_behind() {
  LeftBehind& place = left_behind();
  if (place.count.load() == 0) return 0;
  const std::lock_guard lock(place.mutex);
  std::erase_if(place.segments, [](const std::unique_ptr<SegmentRequest>& segment) {
    if (segment->unread()) return false;
    segment->remove();
    return true;
  });
  place.count.store(place.segments.size());
  return place.segments.size();
}

}  // namespace asyncfabric::libfabric

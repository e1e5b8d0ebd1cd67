// segment_request.cc: see segment_request.h.
#include "providers/libfabric/segment_request.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "providers/libfabric/process.h"

namespace asyncfabric::libfabric {
namespace {

struct LeftBehind {
  std::mutex mutex;
  std::vector<std::unique_ptr<Segment>> segments;
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

bool has_unread_request(const Segment& segment) {
  const auto peers = segment.peers();
  return std::any_of(peers.begin(), peers.end(), [](const SegmentPeer& peer) {
    return __atomic_load_n(&peer.asked, __ATOMIC_RELAXED) != 0 && __atomic_load_n(&peer.number, __ATOMIC_ACQUIRE) < 0 &&
           may_still_read(peer);
  });
}

void close_shm_endpoint(EndpointPtr& endpoint) {
  if (endpoint == nullptr) return;
  std::unique_ptr<Segment> segment = Segment::of(endpoint.get());
  if (segment != nullptr) segment->say_farewell();
  endpoint.reset();
  if (segment == nullptr) return;
  LeftBehind& place = left_behind();
  {
    const std::lock_guard lock(place.mutex);
    place.segments.push_back(std::move(segment));
    place.count.store(place.segments.size());
  }
  (void)sweep_left_behind();
}

size_t sweep_left_behind() {
  LeftBehind& place = left_behind();
  if (place.count.load() == 0) return 0;
  const std::lock_guard lock(place.mutex);
  std::erase_if(place.segments, [](const std::unique_ptr<Segment>& segment) {
    if (has_unread_request(*segment)) return false;
    segment->unlink();
    return true;
  });
  place.count.store(place.segments.size());
  return place.segments.size();
}

}  // namespace asyncfabric::libfabric

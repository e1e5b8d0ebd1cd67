// segment_lock.h: the spin lock in the segment of a shared-memory endpoint. The shm provider of libfabric 1.17 takes a peer's to
// post and its own to make progress, and holds it while it copies. It spins on it without end when the holder was stopped or
// killed, so the rail looks first, and what it finds held it tries again later; see segment_warden.h for the killed.
#pragma once

#include <memory>
#include <string_view>

namespace asyncfabric::libfabric {

class SegmentLock {
 public:
  // Null: the segment cannot be mapped, or it is of a libfabric whose layout is not known here (newer ones queue without a lock).
  static std::unique_ptr<SegmentLock> open(
      std::string_view segment);  // a name from shm_segment_name() or shm_segments_of()
  ~SegmentLock();
  SegmentLock(const SegmentLock&) = delete;
  SegmentLock& operator=(const SegmentLock&) = delete;

  // A moment later it may be otherwise: this makes an endless wait unlikely, not impossible.
  bool held() const;

  // For a lock whose holder is dead. What it had not committed to the queue stays unseen.
  void free();

 private:
  explicit SegmentLock(void* head);
  void* head_;
  int free_;  // what the word holds when nobody has the lock
};

}  // namespace asyncfabric::libfabric

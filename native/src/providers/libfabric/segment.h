// segment.h: the shared memory of an endpoint of the shm profile, ours or a peer's, looked at from outside of libfabric. Any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "providers/libfabric/fids.h"
#include "providers/libfabric/segment_layout.h"

namespace asyncfabric::libfabric {

class Segment {
 public:
  // Null: there is no such segment, or its layout is not known here.
  static std::unique_ptr<Segment> open(std::string_view name);
  static std::unique_ptr<Segment> of(fid_ep* endpoint);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentHead& head() const { return *head_; }
  std::span<SegmentPeer> peers() const;
  bool queue_is_empty() const;
  // Says to those who have it mapped that its endpoint posts no more. libfabric unlinks by the name that the segment carries, so what
  // closes the endpoint then leaves the segment in /dev/shm.
  void say_farewell();
  // Takes the pages of the file, but those of the buffers for bytes unless `buffers_too`: half of it. Returns 0 or what the kernel said.
  int take_room(bool buffers_too) const;
  void unlink() const;

 private:
  Segment(std::string_view name, SegmentHead* head, size_t bytes) : name_(name), head_(head), bytes_(bytes) {}
  std::string name_;
  SegmentHead* head_;
  size_t bytes_;
};

// Whether the endpoint of a mapped segment said farewell.
bool said_farewell(const SegmentHead& head);

}  // namespace asyncfabric::libfabric

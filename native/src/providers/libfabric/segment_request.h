// segment_request.h: how an endpoint of the shm profile leaves. With the first post to a peer libfabric 1.17 queues the endpoint's name
// there; the peer opens the segment of that name when it reads the request, and follows a null pointer when there is none: the end of
// its process. So a segment stays in /dev/shm while somebody alive has a request from it unread, whatever became of its owner.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "providers/libfabric/fids.h"

namespace asyncfabric::libfabric {

struct SegmentHead;

class SegmentRequest {
 public:
  // Null: there is no such segment, or its layout is not known here.
  static std::unique_ptr<SegmentRequest> open(std::string_view segment);
  static std::unique_ptr<SegmentRequest> of(fid_ep* endpoint);
  ~SegmentRequest();
  SegmentRequest(const SegmentRequest&) = delete;
  SegmentRequest& operator=(const SegmentRequest&) = delete;

  bool unread() const;          // by a process that lives and still has the endpoint that was asked
  void outlive_its_endpoint();  // what closes the endpoint leaves the segment where it is
  void remove() const;

 private:
  SegmentRequest(std::string_view segment, SegmentHead* head, size_t bytes)
      : segment_(segment), head_(head), bytes_(bytes) {}
  std::string segment_;
  SegmentHead* head_;
  size_t bytes_;
};

// Closes it; a segment that is still asked for joins those left behind. Any thread.
void close_shm_endpoint(EndpointPtr& endpoint);

// Removes the segments left behind that nobody asks for any more, and says how many remain.
size_t sweep_left_behind();

}  // namespace asyncfabric::libfabric

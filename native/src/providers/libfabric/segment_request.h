// segment_request.h: how an endpoint of the shm profile leaves. With the first post to a peer libfabric 1.17 queues the endpoint's name
// there; the peer opens the segment of that name when it reads the request, and follows a null pointer when there is none: the end of
// its process. So a segment stays in /dev/shm while somebody alive has a request from it unread, whatever became of its owner.
#pragma once

#include <cstddef>

#include "providers/libfabric/segment.h"

namespace asyncfabric::libfabric {

// By a process that lives and still has the endpoint that was asked.
bool has_unread_request(const Segment& segment);

// Closes it; a segment that is still asked for joins those left behind. Any thread.
void close_shm_endpoint(EndpointPtr& endpoint);

// Removes the segments left behind that nobody asks for any more, and says how many remain.
size_t sweep_left_behind();

}  // namespace asyncfabric::libfabric

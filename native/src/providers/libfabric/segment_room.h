// segment_room.h: room in /dev/shm for the segments of the shm profile. libfabric makes a segment longer than what is there and touches it
// later, which then ends the process by SIGBUS: docker gives a container 64 MiB. So it is asked for before, and taken at once.
#pragma once

#include <string>

#include "asyncfabric/status.h"
#include "providers/libfabric/fids.h"

namespace asyncfabric::libfabric {

// kNoMemory: one more segment does not fit. Another process may be quicker in the moment between this and the next.
Status check_segment_room(std::string* detail);

// Takes the pages that an enabled endpoint's segment may need. kNoMemory: they are not there; close the endpoint then.
Status take_segment_room(fid_ep* endpoint, std::string* detail);

// Why libfabric offers no shm at all, as the end of a sentence; empty when there is room enough.
std::string why_no_segments();

}  // namespace asyncfabric::libfabric

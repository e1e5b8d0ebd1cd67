// libfabric_loop.h: the bare loop that the libfabric rail is compared with: what a C programmer would write straight on
// libfabric, in two processes, with the same provider, order and registration modes as the rail. No engine, no rail.
// Both calls block, busy-poll, need no GIL, and meet over a socket (`control_fd`, bidirectional, owned by the caller).
#pragma once

#include "bench/bare_loop.h"

namespace asyncfabric::bench {

// 0, or an errno.
int libfabric_target(const LoopConfig& config, int control_fd, LoopResult* result);
int libfabric_initiator(const LoopConfig& config, int control_fd, LoopResult* result);

}  // namespace asyncfabric::bench

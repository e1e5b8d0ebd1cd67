// verbs_loop.h: the bare loop that the verbs rail is compared with: what a C programmer would write straight on libibverbs, in two
// processes: one RC queue pair, one completion queue, each write posted and completed for itself. No engine, no rail. Takes the same
// configuration as the libfabric loop (`profile` and `provider` are not looked at; `address` names the device, "" the first one).
// Both calls block, busy-poll, need no GIL, and meet over a socket (`control_fd`, bidirectional, owned by the caller).
#pragma once

#include "bench/bare_loop.h"

namespace asyncfabric::bench {

// 0, or an errno.
int verbs_target(const LoopConfig& config, int control_fd, LoopResult* result);
int verbs_initiator(const LoopConfig& config, int control_fd, LoopResult* result);

}  // namespace asyncfabric::bench

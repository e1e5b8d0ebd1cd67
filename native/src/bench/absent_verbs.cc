// absent_verbs.cc: the verbs loop of a build that found no libibverbs headers: refuses when it is called. The twin of
// verbs_loop.cc, which is left out of such a build; exactly one of the two defines these functions.
#ifndef ASYNCFABRIC_WITH_VERBS

#include <cerrno>

#include "bench/verbs_loop.h"

namespace asyncfabric::bench {

int verbs_target(const LoopConfig&, int, LoopResult* result) {
  result->error = "built without libibverbs headers";
  return ENOSYS;
}

int verbs_initiator(const LoopConfig& config, int control_fd, LoopResult* result) {
  return verbs_target(config, control_fd, result);
}

}  // namespace asyncfabric::bench

#endif

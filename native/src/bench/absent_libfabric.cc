// absent_libfabric.cc: the libfabric loop of a build that found no libfabric headers: refuses when it is called. The twin of
// libfabric_loop.cc, which is left out of such a build; exactly one of the two defines these functions.
#ifndef ASYNCFABRIC_WITH_LIBFABRIC

#include <cerrno>

#include "bench/libfabric_loop.h"

namespace asyncfabric::bench {

int libfabric_target(const LoopConfig&, int, LoopResult* result) {
  result->error = "built without libfabric headers";
  return ENOSYS;
}

int libfabric_initiator(const LoopConfig& config, int control_fd, LoopResult* result) {
  return libfabric_target(config, control_fd, result);
}

}  // namespace asyncfabric::bench

#endif

// loops_avx2.cc: the loops for machines with avx2; CMakeLists.txt gives the flags.
#include "rows/loops.h"

namespace asyncfabric::rows {

constinit const Kernels kAvx2Kernels = kernels_named("avx2");

}  // namespace asyncfabric::rows

// loops_avx512.cc: the loops for machines with avx512; CMakeLists.txt gives the flags.
#include "rows/loops.h"

namespace asyncfabric::rows {

constinit const Kernels kAvx512Kernels = kernels_named("avx512");

}  // namespace asyncfabric::rows

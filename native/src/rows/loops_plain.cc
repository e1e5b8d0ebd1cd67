// loops_plain.cc: the loops for what every machine of the architecture has.
#include "rows/loops.h"

namespace asyncfabric::rows {

constinit const Kernels kPlainKernels = kernels_named("plain");

}  // namespace asyncfabric::rows

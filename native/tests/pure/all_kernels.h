// all_kernels.h: the inner loops of all instruction sets that this machine has, the plain ones first.
#pragma once

#include <vector>

#include "rows/kernels.h"

namespace asyncfabric::rows {

inline std::vector<const Kernels*> all_kernels() {
  std::vector<const Kernels*> found{&kPlainKernels};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) found.push_back(&kAvx2Kernels);
  if (best_kernels().name == kAvx512Kernels.name) found.push_back(&kAvx512Kernels);
#endif
  return found;
}

}  // namespace asyncfabric::rows

// coverage.cc: counts the blocks of the decoders that ran for the first time. The compiler calls the hook at each block of what is built
// with -fsanitize-coverage=trace-pc; this file is not. One thread.
#include "coverage.h"

#include <array>

namespace asyncfabric::fuzz {
namespace {

constexpr unsigned kBits = 16;
std::array<bool, 1u << kBits> seen;
uint64_t count = 0;

}  // namespace

uint64_t blocks_seen() { return count; }
void forget_blocks() {
  seen.fill(false);
  count = 0;
}

}  // namespace asyncfabric::fuzz

extern "C" void __sanitizer_cov_trace_pc();
extern "C" void __sanitizer_cov_trace_pc() {
  const auto at = reinterpret_cast<uintptr_t>(__builtin_return_address(0)) * 0x9e3779b97f4a7c15ull;
  bool& block = asyncfabric::fuzz::seen[at >> (64 - asyncfabric::fuzz::kBits)];
  if (block) return;
  block = true;
  ++asyncfabric::fuzz::count;
}

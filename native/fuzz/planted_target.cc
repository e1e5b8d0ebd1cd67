// planted_target.cc: a decoder with a bug that only an input with three right bytes reaches: the fuzzer must find it within seconds, which
// tests/fuzz/run.py has it do before anything else.
#include "target.h"

namespace asyncfabric::fuzz {
namespace {

void read_planted(std::string_view bytes) {
  if (bytes.size() < 4 || bytes[0] != 'A') return;
  if (bytes[1] != 'F') return;
  if (bytes[2] != '\x80') return;
  const volatile char behind = bytes.data()[bytes.size()];
  (void)behind;
}

}  // namespace

std::vector<Target> planted_target() {
  return {{"planted", read_planted, [] { return std::vector<std::string>{"0000"}; }}};
}

}  // namespace asyncfabric::fuzz

// target.h: what is fuzzed: a decoder under a name, first inputs made by the encoder that belongs to it, and how an input is made right
// again behind a change. A target checks what it decodes with require(), so that a wrong answer ends the process as a bad access does.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace asyncfabric::fuzz {

struct Target {
  const char* name;
  void (*run)(std::string_view bytes);
  std::vector<std::string> (*seeds)();
  void (*repair)(std::string* bytes) = nullptr;  // checksums and the like, without which nothing else would be read
};

std::vector<Target> engine_targets();
std::vector<Target> provider_targets();
std::vector<Target> local_targets();
std::vector<Target> planted_target();

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

}  // namespace asyncfabric::fuzz

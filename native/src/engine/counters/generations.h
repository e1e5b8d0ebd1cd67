// generations.h: of which opening each imm of one fabric is, in 2 bits, as runs of equal neighbours. Counters take imms in a circle, so half a million
// reopened ones are a few runs: they fit into the greeting that peers exchange. Imms that users name may lie anywhere; those come in slices.
// Under the engine lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "asyncfabric/types.h"

namespace asyncfabric {

class Generations {
 public:
  static constexpr uint32_t kEnd = kMaxImm + 1;

  bool all_zero() const { return runs_.empty(); }
  uint32_t of(uint32_t imm) const {
    const auto after = runs_.upper_bound(imm);
    return after == runs_.begin() ? 0 : std::prev(after)->second;
  }
  void set(uint32_t imm, uint32_t generation) { set(imm, imm, generation); }
  void set(uint32_t first, uint32_t last, uint32_t generation);

  // A slice: `from`, where the next slice begins (kEnd: nowhere), and runs that are not 0, as many as fit into `most_bytes`.
  std::string slice(uint32_t from, size_t most_bytes) const;
  // Takes a slice over if it begins at `from`. What the next one begins with; `from` again, and nothing is taken, when these bytes are no
  // such slice.
  uint32_t learn(uint32_t from, std::string_view slice);

 private:
  std::map<uint32_t, uint32_t>
      runs_;  // where a run begins -> its generation; neighbours differ, before the first all is 0
};

}  // namespace asyncfabric

// generations.cc: see generations.h.
#include "engine/counters/generations.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "base/bytes.h"

namespace asyncfabric {

namespace {

constexpr size_t kHeadBytes = 8;   // from, next
constexpr size_t kEntryBytes = 8;  // first << 2 | generation, last

}  // namespace

void Generations::set(uint32_t first, uint32_t last, uint32_t generation) {
  generation &= 3;
  const uint32_t before = first == 0 ? 0 : of(first - 1);
  const uint32_t after = of(last + 1);
  runs_.erase(runs_.lower_bound(first), runs_.upper_bound(last + 1));
  if (generation != before) runs_.emplace(first, generation);
  if (after != generation) runs_.emplace(last + 1, after);
}

std::string Generations::slice(uint32_t from, size_t most_bytes) const {
  ByteWriter runs;
  uint32_t next = kEnd;
  auto run = runs_.upper_bound(from);
  if (run != runs_.begin()) --run;
  for (; run != runs_.end(); ++run) {
    if (run->second == 0) continue;
    const auto after = std::next(run);
    const uint32_t first = std::max(run->first, from), last = (after == runs_.end() ? kEnd : after->first) - 1;
    if (last < first) continue;
    if (kHeadBytes + runs.text().size() + kEntryBytes > most_bytes) {
      next = first;
      break;
    }
    runs.put(first << 2 | run->second);
    runs.put(last);
  }
  ByteWriter whole;
  whole.put(from);
  whole.put(next);
  whole.put_raw(runs.text());
  return std::move(whole.text());
}

uint32_t Generations::learn(uint32_t from, std::string_view slice) {
  ByteReader head(slice);
  const uint32_t begin = head.get<uint32_t>(), next = head.get<uint32_t>();
  // A slice always leads on, so that asking for the next one ends.
  if (!head.ok() || begin != from || next <= from || next > kEnd || head.rest().size() % kEntryBytes != 0) return from;
  struct Run {
    uint32_t first, last, generation;
  };
  std::vector<Run> taken;
  taken.reserve(head.rest().size() / kEntryBytes);
  uint32_t free = from;
  for (ByteReader runs(head.rest()); !runs.rest().empty();) {
    const uint32_t word = runs.get<uint32_t>(), first = word >> 2, last = runs.get<uint32_t>();
    if (first < free || last < first || last >= next) return from;
    taken.push_back({first, last, word & 3});
    free = last + 1;
  }
  for (const Run& run : taken) set(run.first, run.last, run.generation);
  return next;
}

}  // namespace asyncfabric

// records.cc: the records that open a step, as rows.h describes them. Fronts may lie in memory that another process
// changes at any time: each number of a record is read once, into memory of this process, and checked there.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "asyncfabric/rows.h"

namespace asyncfabric::rows {
namespace {

constexpr size_t kFixedBytes = 32;

// From the shared memory into memory of this process. Whoever uses the copy does not look at the original again.
void copy_once(void* into, const uint8_t* from, size_t bytes) {
  if (bytes != 0) std::memcpy(into, from, bytes);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

size_t head_bytes(size_t members) { return kFixedBytes + (members * 4 + 15) / 16 * 16; }

size_t meta_bytes(size_t choices, size_t scales) { return 4 * (1 + 2 * choices + scales); }

// Whether a front has room for a head and so many rows.
bool room_for(std::span<const uint8_t> front, size_t members, size_t rows, size_t choices, size_t scales) {
  const size_t head = head_bytes(members);
  return front.size() >= head && rows <= (front.size() - head) / meta_bytes(choices, scales);
}

bool fits(size_t rows, const About& about) {
  return about.choices > 0 && about.origins.size() == rows && about.experts.size() == rows * about.choices &&
         about.weights.size() == rows * about.choices && about.scales.size() == rows * about.scales_of_row;
}

// Offsets begin with 0, ascend, and end with `last`.
bool cut(std::span<const int64_t> offsets, size_t members, size_t last) {
  return offsets.size() == members + 1 && offsets.front() == 0 && std::is_sorted(offsets.begin(), offsets.end()) &&
         static_cast<uint64_t>(offsets.back()) == last;
}

size_t length_of(std::span<const int64_t> offsets, size_t member) {
  return static_cast<size_t>(offsets[member + 1] - offsets[member]);
}

struct Goal {
  size_t member, token;
};

bool known(std::span<const int32_t> experts, std::span<const int64_t> owner) {
  return std::all_of(experts.begin(), experts.end(),
                     [&](int32_t each) { return each >= -1 && each < static_cast<int64_t>(owner.size()); });
}

}  // namespace

int64_t plan_route(std::span<const int32_t> experts, size_t choices, std::span<const int64_t> owner,
                   std::span<int64_t> tokens, std::span<int64_t> offsets) {
  if (choices == 0 || offsets.empty() || experts.size() % choices != 0 || !known(experts, owner)) return -1;
  const size_t members = offsets.size() - 1;
  for (const int64_t member : owner)
    if (member < -1 || member >= static_cast<int64_t>(members)) return -1;
  // Each goal, a member of a token, once. Where a choice goes is chance: goals are listed without a branch for each.
  const size_t count = experts.size() / choices;
  const auto goals = std::make_unique_for_overwrite<Goal[]>(experts.size() + 1);
  std::vector<size_t> seen(members + 1, count), next(members);  // the last is the member of choices without one
  size_t listed = 0;
  for (size_t token = 0; token < count; ++token)
    for (const int32_t expert : experts.subspan(token * choices, choices)) {
      const int64_t found = expert < 0 ? -1 : owner[static_cast<size_t>(expert)];
      const size_t member = found < 0 ? members : static_cast<size_t>(found);
      goals[listed] = {member, token};
      listed += (member != members) & (seen[member] != token);
      seen[member] = token;
    }
  if (listed > tokens.size()) return -1;
  std::fill(offsets.begin(), offsets.end(), 0);
  for (size_t goal = 0; goal < listed; ++goal) ++offsets[goals[goal].member + 1];
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  std::copy(offsets.begin(), offsets.end() - 1, next.begin());
  for (size_t goal = 0; goal < listed; ++goal)
    tokens[next[goals[goal].member]++] = static_cast<int64_t>(goals[goal].token);
  return offsets.back();
}

bool write_records(std::span<const std::span<uint8_t>> fronts, uint32_t sender, uint64_t step, const About& about,
                   std::span<const int64_t> owner, std::span<const int64_t> tokens, std::span<const int64_t> offsets) {
  const size_t members = fronts.size(), choices = about.choices, scales = about.scales_of_row;
  const size_t known_tokens = about.origins.size();
  if (!fits(known_tokens, about) || !cut(offsets, members, tokens.size()) || !known(about.experts, owner)) return false;
  for (const int64_t token : tokens)
    if (token < 0 || static_cast<uint64_t>(token) >= known_tokens) return false;
  for (size_t member = 0; member < members; ++member)
    if (!room_for(fronts[member], members, length_of(offsets, member), choices, scales)) return false;

  std::vector<uint32_t> counts(members);
  for (size_t member = 0; member < members; ++member)
    counts[member] = static_cast<uint32_t>(length_of(offsets, member));
  for (size_t member = 0; member < members; ++member) {
    const auto listed =
        tokens.subspan(static_cast<size_t>(offsets[member]), static_cast<size_t>(length_of(offsets, member)));
    uint8_t* const head = fronts[member].data() + fronts[member].size() - head_bytes(members);
    const RecordHead fixed{kRecordMagic, sender, step, counts[member], static_cast<uint32_t>(members), 0};
    static_assert(sizeof fixed == kFixedBytes);
    std::memcpy(head, &fixed, sizeof fixed);
    std::memcpy(head + sizeof fixed, counts.data(), 4 * members);
    uint8_t* at = head - listed.size() * meta_bytes(choices, scales);
    const auto put = [&at](const void* from, size_t bytes) {
      if (bytes != 0) std::memcpy(at, from, bytes);
      at += bytes;
    };
    for (const int64_t token : listed) put(&about.origins[static_cast<size_t>(token)], 4);
    for (const int64_t token : listed)
      for (const int32_t expert : about.experts.subspan(static_cast<size_t>(token) * choices, choices)) {
        const bool here = expert >= 0 && owner[static_cast<size_t>(expert)] == static_cast<int64_t>(member);
        const int32_t shown = here ? expert : -1;
        put(&shown, 4);
      }
    for (const int64_t token : listed) put(about.weights.data() + static_cast<size_t>(token) * choices, 4 * choices);
    for (const int64_t token : listed) put(about.scales.data() + static_cast<size_t>(token) * scales, 4 * scales);
  }
  return true;
}

HeadCheck read_heads(std::span<const std::span<uint8_t>> fronts, uint32_t reader, uint64_t step, uint64_t max_tokens,
                     std::span<int64_t> counts, std::span<int64_t> offsets) {
  const size_t members = fronts.size();
  const auto misused = [&](const std::span<uint8_t>& front) { return front.size() < head_bytes(members); };
  if (reader >= members || counts.size() != members * members || offsets.size() != members + 1 ||
      std::any_of(fronts.begin(), fronts.end(), misused))
    return {HeadVerdict::kMisuse, 0, {}};
  offsets[0] = 0;
  std::vector<uint32_t> listed(members);
  for (size_t member = 0; member < members; ++member) {
    const uint8_t* const front = fronts[member].data() + fronts[member].size() - head_bytes(members);
    RecordHead head{};
    copy_once(&head, front, sizeof head);
    copy_once(listed.data(), front + sizeof head, 4 * members);
    if (head.magic != kRecordMagic || head.member != member || head.step != step || head.members != members)
      return {HeadVerdict::kOtherRecord, member, head};
    if (head.rows > max_tokens || listed[reader] != head.rows ||
        *std::max_element(listed.begin(), listed.end()) > max_tokens)
      return {HeadVerdict::kTooManyRows, member, head};
    std::copy(listed.begin(), listed.end(), counts.begin() + static_cast<std::ptrdiff_t>(member * members));
    offsets[member + 1] = offsets[member] + int64_t{head.rows};
  }
  return {HeadVerdict::kFine, 0, {}};
}

bool read_rows(std::span<const std::span<uint8_t>> fronts, std::span<const int64_t> offsets, const ReadAbout& into) {
  const size_t members = fronts.size(), rows = into.origins.size(), choices = into.choices;
  const About sizes{into.origins, into.experts, into.weights, into.scales, choices, into.scales_of_row};
  if (!fits(rows, sizes) || !cut(offsets, members, rows)) return false;
  for (size_t member = 0; member < members; ++member)
    if (!room_for(fronts[member], members, length_of(offsets, member), choices, into.scales_of_row)) return false;
  for (size_t member = 0; member < members; ++member) {
    const auto begin = static_cast<size_t>(offsets[member]);
    const size_t count = length_of(offsets, member);
    const uint8_t* at = fronts[member].data() + fronts[member].size() - head_bytes(members) -
                        count * meta_bytes(choices, into.scales_of_row);
    const auto take = [&at, begin, count](auto target, size_t width) {
      copy_once(target.data() + begin * width, at, 4 * count * width);
      at += 4 * count * width;
    };
    take(into.origins, 1);
    take(into.experts, choices);
    take(into.weights, choices);
    take(into.scales, into.scales_of_row);
  }
  return true;
}

}  // namespace asyncfabric::rows

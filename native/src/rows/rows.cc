// rows.cc: what rows.h promises, on top of the loops: checks, and which row goes where.
#include "asyncfabric/rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "rows/kernels.h"
#include "rows/sharing.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncfabric::rows {
namespace {

constexpr size_t kLanes = 16, kLineBytes = 64;
// A target larger than a core's share of the caches is written past them: whoever reads it next finds it in memory
// either way, and its lines need not be read before they are overwritten.
constexpr size_t kStreamFromBytes = size_t{12} << 20;

bool inside(std::span<const int64_t> index, size_t count) {
  return std::all_of(index.begin(), index.end(),
                     [count](int64_t each) { return each >= 0 && static_cast<uint64_t>(each) < count; });
}

// Rows lie apart, and a processor does not see where the next one begins: its first lines are asked for while others are added.
// Always inline: GCC takes a function that only prefetches for one without effect and drops the call.
[[gnu::always_inline]] inline void ask_for(const uint8_t* row, size_t width) {
  constexpr size_t kLines = 16;
  const size_t lines = std::min(kLines, width / kLineBytes);
  for (size_t line = 0; line < lines; ++line) __builtin_prefetch(row + line * kLineBytes);
}

// Offsets ascend and point to pairs whose positions are those of rows.
bool ascending(std::span<const int64_t> offsets, std::span<const int64_t> position, size_t rows) {
  if (offsets.empty() || offsets.front() < 0 || !std::is_sorted(offsets.begin(), offsets.end())) return false;
  const auto first = static_cast<size_t>(offsets.front()), last = static_cast<size_t>(offsets.back());
  return last <= position.size() && inside(position.subspan(first, last - first), rows);
}

// Whether a part has rows that there are, `rows` of them in all, and no more of them than `room`.
bool within(const auto& part, size_t rows, size_t room) {
  return part.begin >= 0 && part.end >= part.begin && static_cast<uint64_t>(part.end) <= rows &&
         length_of(part) <= room;
}

bool all_within(std::span<const GoingRows> going, size_t rows, size_t row_bytes) {
  return std::all_of(going.begin(), going.end(), [&](const GoingRows& part) {
    return part.target.row_bytes == row_bytes && within(part, rows, part.target.count);
  });
}

bool all_within(std::span<const ComingRows> coming, size_t rows, size_t row_bytes) {
  return std::all_of(coming.begin(), coming.end(), [&](const ComingRows& part) {
    const size_t room = part.picks ? part.picked.size() : part.source.count;
    return part.source.row_bytes == row_bytes && within(part, rows, room) &&
           (!part.picks || inside(part.picked.first(length_of(part)), part.source.count));
  });
}

// Whether rows can be written past the caches.
bool at_lines(const Target& target) {
  return target.row_bytes % kLineBytes == 0 && reinterpret_cast<uintptr_t>(target.data) % kLineBytes == 0;
}

// Streaming stores are weakly ordered: another thread may read the rows next.
void end_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

size_t element_bytes(RowKind kind) { return kind == RowKind::kFloat32 ? 4 : 2; }

bool fits(RowKind kind, size_t row_bytes) {
  return kind <= RowKind::kFloat32 && row_bytes % (kLanes * element_bytes(kind)) == 0;
}

// For each token the rows that the parts have for it: parts are walked side by side, since tokens ascend in each.
class Addends {
 public:
  Addends(Source source, std::span<const int64_t> tokens, std::span<const Part> parts)
      : source_(source), tokens_(tokens), parts_(parts.begin(), parts.end()) {
    found_.reserve(parts.size());
  }

  bool valid(size_t target_count) const {
    for (const Part& part : parts_) {
      if (part.begin < 0 || part.end < part.begin || static_cast<uint64_t>(part.end) > tokens_.size()) return false;
      const auto length = static_cast<size_t>(part.end - part.begin);
      if (part.at < 0 || static_cast<uint64_t>(part.at) > source_.count) return false;
      if (length > source_.count - static_cast<size_t>(part.at)) return false;
      const auto mine = tokens_.subspan(static_cast<size_t>(part.begin), length);
      if (!inside(mine, target_count) || !std::is_sorted(mine.begin(), mine.end(), std::less_equal<>())) return false;
    }
    return true;
  }

  // Goes to a token, once; tokens ascend in each part.
  void seek(size_t token) {
    for (Part& part : parts_) {
      const auto* begin = tokens_.data() + part.begin;
      const auto* found = std::lower_bound(begin, tokens_.data() + part.end, static_cast<int64_t>(token));
      part.at += found - begin;
      part.begin += found - begin;
    }
  }

  // For one token after the other, from the one that it went to, or from 0 on.
  std::span<const uint8_t* const> next(size_t token) {
    found_.clear();
    for (Part& part : parts_) {
      if (part.begin == part.end || tokens_[static_cast<size_t>(part.begin)] != static_cast<int64_t>(token)) continue;
      found_.push_back(source_.data + static_cast<size_t>(part.at++) * source_.row_bytes);
      ++part.begin;
    }
    return found_;
  }

 private:
  Source source_;
  std::span<const int64_t> tokens_;
  std::vector<Part> parts_;
  std::vector<const uint8_t*> found_;
};

}  // namespace

const Kernels& best_kernels() {
#if defined(__x86_64__)
  static const Kernels& best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
                                   ? kAvx512Kernels
                               : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? kAvx2Kernels
                                                                                                  : kPlainKernels;
  return best;
#else
  return kPlainKernels;
#endif
}

const char* sums_kind() { return best_kernels().name; }

bool take_rows(Source source, std::span<const int64_t> index, std::span<const GoingRows> going) {
  const size_t width = source.row_bytes;
  if (!all_within(going, index.size(), width)) return false;
  for (const GoingRows& part : going)
    if (!inside(index.subspan(static_cast<size_t>(part.begin), length_of(part)), source.count)) return false;
  share_parts(going, width, [&](const GoingRows& part, size_t first, size_t end) {
    const int64_t* const taken = index.data() + part.begin;
    for (size_t row = first; row < end; ++row)
      std::memcpy(part.target.data + row * width, source.data + static_cast<size_t>(taken[row]) * width, width);
  });
  return true;
}

bool spread_rows(std::span<const ComingRows> coming, std::span<const int64_t> pair_offsets,
                 std::span<const int64_t> position, Target target) {
  const size_t width = target.row_bytes;
  if (!ascending(pair_offsets, position, target.count) || !all_within(coming, pair_offsets.size() - 1, width))
    return false;
  const bool past = target.count * width >= kStreamFromBytes && at_lines(target);
  const auto stream = best_kernels().stream;
  share_parts(coming, width, [&](const ComingRows& part, size_t first, size_t end) {
    const int64_t* const offsets = pair_offsets.data() + part.begin;
    for (size_t row = first; row < end; ++row) {
      const uint8_t* from = part.source.data + (part.picks ? static_cast<size_t>(part.picked[row]) : row) * width;
      for (auto pair = static_cast<size_t>(offsets[row]); pair < static_cast<size_t>(offsets[row + 1]); ++pair) {
        uint8_t* to = target.data + static_cast<size_t>(position[pair]) * width;
        if (past)
          stream(to, from, width);
        else
          std::memcpy(to, from, width);
      }
    }
    if (past) end_streams();
  });
  return true;
}

bool weigh_rows(Source source, RowKind kind, std::span<const int64_t> pair_offsets, std::span<const int64_t> position,
                std::span<const float> weights, std::span<const GoingRows> going) {
  const size_t width = source.row_bytes;
  if (!fits(kind, width) || weights.size() != position.size() || !ascending(pair_offsets, position, source.count))
    return false;
  if (!all_within(going, pair_offsets.size() - 1, width)) return false;
  const auto sum = best_kernels().sum[static_cast<size_t>(kind)];
  share_parts(going, width, [&](const GoingRows& part, size_t first, size_t end) {
    const int64_t* const offsets = pair_offsets.data() + part.begin;
    std::vector<const uint8_t*> sources;
    for (size_t row = first; row < end; ++row) {
      const auto pair = static_cast<size_t>(offsets[row]), behind = static_cast<size_t>(offsets[row + 1]);
      if (row + 1 < end)
        for (size_t next = behind; next < static_cast<size_t>(offsets[row + 2]); ++next)
          ask_for(source.data + static_cast<size_t>(position[next]) * width, width);
      sources.clear();
      for (size_t each = pair; each < behind; ++each)
        sources.push_back(source.data + static_cast<size_t>(position[each]) * width);
      sum(part.target.data + row * width, sources.data(), weights.data() + pair, sources.size(),
          width / element_bytes(kind));
    }
  });
  return true;
}

bool add_rows(Source source, RowKind kind, std::span<const int64_t> tokens, std::span<const Part> parts,
              Target target) {
  const Addends all(source, tokens, parts);
  if (source.row_bytes != target.row_bytes || !fits(kind, source.row_bytes) || !all.valid(target.count)) return false;
  const auto sum = best_kernels().sum[static_cast<size_t>(kind)];
  share_rows(target.count, target.row_bytes, [&](size_t first, size_t end) {
    Addends addends(source, tokens, parts);
    addends.seek(first);
    for (size_t token = first; token < end; ++token) {
      const auto found = addends.next(token);
      sum(target.data + token * target.row_bytes, found.data(), nullptr, found.size(),
          target.row_bytes / element_bytes(kind));
    }
  });
  return true;
}

bool gather_sums(Source source, RowKind kind, std::span<const int64_t> tokens, std::span<const Part> parts,
                 std::span<float> sums) {
  if (!fits(kind, source.row_bytes) || source.row_bytes == 0) return false;
  const size_t width = source.row_bytes / element_bytes(kind), count = sums.size() / width;
  const Addends all(source, tokens, parts);
  if (sums.size() != count * width || !all.valid(count)) return false;
  const auto carry = best_kernels().carry[static_cast<size_t>(kind)];
  share_rows(count, source.row_bytes, [&](size_t first, size_t end) {
    Addends addends(source, tokens, parts);
    addends.seek(first);
    for (size_t token = first; token < end; ++token) {
      const auto found = addends.next(token);
      if (!found.empty()) carry(sums.data() + token * width, found.data(), found.size(), width);
    }
  });
  return true;
}

}  // namespace asyncfabric::rows

// rows.h: moving and adding up rows of tokens, for asyncfabric.moe. Pure functions over memory, any thread, no GIL needed.
// Every index is checked before anything is written: false means that one points outside, or that sizes do not fit.
//
// Sums are made in fp32, one addend after the other in the order given, and rounded once (to nearest, even) when they
// are stored. Products are rounded before they are added: these files are compiled without contraction, so that no
// machine fuses the two and all have the same bits (MOE-3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace asyncfabric::rows {

enum class RowKind : uint32_t { kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// `count` rows of `row_bytes` bytes each, one behind the other.
struct Source {
  const uint8_t* data = nullptr;
  size_t count = 0;
  size_t row_bytes = 0;
};
struct Target {
  uint8_t* data = nullptr;
  size_t count = 0;
  size_t row_bytes = 0;
};

// Rows [begin, end) of a step, those of one member: they go to the first rows of a target. All members are served by one loop.
struct GoingRows {
  int64_t begin = 0;
  int64_t end = 0;
  Target target;
};

// Rows [begin, end) of a step that come from the first rows of a source; where it `picks`, from rows picked[0], picked[1] ...
struct ComingRows {
  int64_t begin = 0;
  int64_t end = 0;
  Source source;
  bool picks = false;
  std::span<const int64_t> picked;
};

// Row i goes from row index[i] of the source.
bool take_rows(Source source, std::span<const int64_t> index, std::span<const GoingRows> going);

// Row i is copied to the rows position[pair_offsets[i]] .. position[pair_offsets[i + 1] - 1] of the target.
bool spread_rows(std::span<const ComingRows> coming, std::span<const int64_t> pair_offsets,
                 std::span<const int64_t> position, Target target);

// Row i is the sum over its pairs p of weights[p] * source row position[p].
bool weigh_rows(Source source, RowKind kind, std::span<const int64_t> pair_offsets, std::span<const int64_t> position,
                std::span<const float> weights, std::span<const GoingRows> going);

// Rows of one sender: source row at + i is one addend of token tokens[begin + i]; tokens ascend from begin to end.
struct Part {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t at = 0;
};

// Row t of the target becomes the sum of the rows that the parts have for token t, in the order of parts.
bool add_rows(Source source, RowKind kind, std::span<const int64_t> tokens, std::span<const Part> parts, Target target);

// The same, added to fp32 sums of `width` elements for each token that are kept from one call to the next.
bool gather_sums(Source source, RowKind kind, std::span<const int64_t> tokens, std::span<const Part> parts,
                 std::span<float> sums);

// The pairs of rows and experts first .. first + counts.size() - 1; `choices` of each row, others are none of these.
// counts: rows of each expert; begins: where those of each begin, at multiples of `alignment`, and where the last end;
// pair_offsets: rows + 1 entries. Returns the number of pairs; -1 where sizes do not fit.
int64_t count_pairs(std::span<const int32_t> experts, size_t choices, int32_t first, int64_t alignment,
                    std::span<int64_t> counts, std::span<int64_t> begins, std::span<int64_t> pair_offsets);

// Where each pair's row goes, and its weight: pairs in the order of rows, then of choices.
// row_of and choice_of have an entry for each output row: which row and choice it is of, -1 for padding.
struct Pairs {
  std::span<int64_t> position;
  std::span<float> weights;
  std::span<int64_t> row_of, choice_of;
};
bool place_pairs(std::span<const int32_t> experts, std::span<const float> weights, size_t choices, int32_t first,
                 std::span<const int64_t> begins, const Pairs& pairs);

// The tokens of each member, one copy each however many of their experts it holds: ascending, those for member 0 first.
// `owner` has the member of each expert, -1 where none has it; -1 is no expert. Offsets: one more than members.
// Returns how many entries of `tokens` are used; -1 where experts or members do not exist, or `tokens` is too short.
int64_t plan_route(std::span<const int32_t> experts, size_t choices, std::span<const int64_t> owner,
                   std::span<int64_t> tokens, std::span<int64_t> offsets);

// A record opens a step between two members. It fills the end of a front and grows backwards with its rows:
// [origins][experts][weights][scales][head], a head being these numbers and a count for each member.
struct RecordHead {
  uint32_t magic, member;
  uint64_t step;
  uint32_t rows, members;
  uint64_t spare;
};
constexpr uint32_t kRecordMagic = 0x454F4D01;

// What rows are about, one entry each; `choices` experts and weights, `scales_of_row` scales.
struct About {
  std::span<const int32_t> origins, experts;
  std::span<const float> weights, scales;
  size_t choices, scales_of_row;
};
struct ReadAbout {
  std::span<int32_t> origins, experts;
  std::span<float> weights, scales;
  size_t choices, scales_of_row;
};

// Writes the record for each member to its front, about its part of `tokens`. Experts of others are written as -1.
bool write_records(std::span<const std::span<uint8_t>> fronts, uint32_t sender, uint64_t step, const About& about,
                   std::span<const int64_t> owner, std::span<const int64_t> tokens, std::span<const int64_t> offsets);

enum class HeadVerdict : uint32_t { kFine = 0, kOtherRecord = 1, kTooManyRows = 2, kMisuse = 3 };
struct HeadCheck {
  HeadVerdict verdict = HeadVerdict::kFine;
  size_t member = 0;  // the first that was refused, and its head as it was checked
  RecordHead head{};
};

// Reads what the heads of all members announce: counts[sender * members + receiver], and where the rows of each sender begin
// among those for `reader`. Peers write fronts whenever they like: what is returned was copied first, then checked.
HeadCheck read_heads(std::span<const std::span<uint8_t>> fronts, uint32_t reader, uint64_t step, uint64_t max_tokens,
                     std::span<int64_t> counts, std::span<int64_t> offsets);

// Copies what the rows of all members are about; `offsets` as read_heads made them, no number of a front is looked at.
bool read_rows(std::span<const std::span<uint8_t>> fronts, std::span<const int64_t> offsets, const ReadAbout& into);

// How many threads take part in a loop that is long enough, the caller among them; 0: by the cores. One loop at a time has them. Waits for
// a loop that has them now.
void use_threads(uint32_t threads);

const char* sums_kind();  // which instructions the sums use: avx512, avx2 or plain

}  // namespace asyncfabric::rows

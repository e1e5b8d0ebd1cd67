// route.cuh: what a dispatch is launched with, and the blocks that route, a piece of the tokens each: they number each choice among the
// piece's pairs for the expert, so that receivers find rows without sorting, and notify all ranks.
#pragma once
#include "words.cuh"

namespace moe {

constexpr uint32_t kSendWarps = 4;
constexpr uint32_t kReceiveWarps = 8;
constexpr uint32_t kDispatchWarps = kSendWarps + kReceiveWarps;

// Tokens that the caller has as bfloat16 are sent as fp8, with a scale for each 128 elements; `kPowersOfTwo`: scales are powers of two.
enum Cast : uint32_t { kAsTheyAre, kToFp8, kPowersOfTwo };

struct Dispatch {
  const char* x;
  const void* indices;
  const float* weights;
  const float* scales;
  const int32_t* count;  // tokens, read when the kernel runs; null: `tokens`
  char* rows;
  float* row_scales;
  int32_t* tokens_per_expert;
  int32_t* offsets;
  int32_t* source_ranks;
  int32_t* source_tokens;
  int32_t* source_choices;
  Pair* pairs;        // [ranks][max_tokens][top_k]: the row of each choice here, kNone for others
  uint32_t* reached;  // [max_tokens]: the ranks of each own token
  uint32_t* counts;   // [ranks]: tokens of each rank
  uint32_t*
      places;  // [2][ranks][max_tokens]: which row of the parcel a token is behind a proxy: own ones sent, those that came
  // Of rows in slots: [experts][ranks], where the rows of a rank begin among those of the expert, and how many (low half).
  int64_t* ranges;
  int64_t* waited;  // [ranks]: nanoseconds of waiting for the routes of each are added; null: not wanted
  uint32_t tokens, wide_indices, roles;
  Cast cast;
};

__device__ inline uint32_t tokens_of(const Exchange& ex, const Dispatch& go) {
  if (go.count == nullptr) return go.tokens;
  const int32_t count = *go.count;
  return count < 0 ? 0 : min(static_cast<uint32_t>(count), go.tokens);
}

__device__ inline int64_t index_at(const Dispatch& go, uint64_t at) {
  return go.wide_indices ? static_cast<const int64_t*>(go.indices)[at] : static_cast<const int32_t*>(go.indices)[at];
}

// The choices of a piece of the tokens, and the part of them that a warp of the block that routes it numbers.
struct Share {
  uint32_t tokens, low, high;
};

__device__ inline Share share_of(const Exchange& ex, const Dispatch& go, uint32_t piece) {
  const uint32_t tokens = tokens_of(ex, go), warp = threadIdx.x / 32;
  const uint32_t start = min(piece * piece_tokens(ex), tokens) * ex.top_k;
  const uint32_t choices = min((piece + 1) * piece_tokens(ex), tokens) * ex.top_k - start;
  const uint32_t each = (choices + kDispatchWarps * 32 - 1) / (kDispatchWarps * 32) * 32;
  return {tokens, start + min(warp * each, choices), start + min((warp + 1) * each, choices)};
}

// As many choices as a warp has in hand: their loads are under way together. kNone: an expert that does not exist.
struct Batch {
  static constexpr uint32_t kRounds = 4, kChoices = kRounds * 32;
  uint32_t experts[kRounds];
  float weights[kRounds];
};

template <typename Index>
__device__ inline void load_experts(const Exchange& ex, const Index* indices, uint32_t begin, uint32_t high,
                                    Batch& batch) {
  Index found[Batch::kRounds];
#pragma unroll
  for (uint32_t i = 0; i < Batch::kRounds; ++i) {
    const uint32_t at = begin + i * 32 + lane_of();
    found[i] = at < high ? indices[at] : -1;
  }
#pragma unroll
  for (uint32_t i = 0; i < Batch::kRounds; ++i)
    batch.experts[i] = found[i] >= 0 && found[i] < ex.experts ? static_cast<uint32_t>(found[i]) : kNone;
}

__device__ inline void load_batch(const Exchange& ex, const Dispatch& go, uint32_t begin, uint32_t high, Batch& batch) {
#pragma unroll
  for (uint32_t i = 0; i < Batch::kRounds; ++i) {
    const uint32_t at = begin + i * 32 + lane_of();
    batch.weights[i] = at < high ? go.weights[at] : 0;
  }
  if (go.wide_indices)
    load_experts(ex, static_cast<const int64_t*>(go.indices), begin, high, batch);
  else
    load_experts(ex, static_cast<const int32_t*>(go.indices), begin, high, batch);
}

// All warps of a block that routes, one piece of the tokens. `batch`: the first of the warp's share, which was loaded before anything
// else. `histogram`: a row of ex.experts words for each warp, and one of owners.
__device__ inline void send_record(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t piece, Share share,
                                   Batch& batch, uint32_t* histogram) {
  const auto [tokens, low, high] = share;
  const uint32_t lane = lane_of();
  uint32_t* const mine = histogram + threadIdx.x / 32 * ex.experts;
  uint32_t* const owners = histogram + kDispatchWarps * ex.experts;
  for (uint32_t i = threadIdx.x; i < kDispatchWarps * ex.experts; i += blockDim.x) histogram[i] = 0;
  for (uint32_t i = threadIdx.x; i < ex.experts; i += blockDim.x) owners[i] = owner_of(ex, i);
  __syncthreads();
  const auto reachable = [&](uint32_t expert) { return expert != kNone && owners[expert] != kNone; };
  for (uint32_t begin = low; begin < high; begin += Batch::kChoices) {
    if (begin != low) load_batch(ex, go, begin, high, batch);
#pragma unroll
    for (uint32_t i = 0; i < Batch::kRounds; ++i)
      if (reachable(batch.experts[i])) atomicAdd(&mine[batch.experts[i]], 1);
  }
  if (high - low > Batch::kChoices) load_batch(ex, go, low, high, batch);  // from the beginning again
  __syncthreads();
  for (uint32_t expert = threadIdx.x; expert < ex.experts; expert += blockDim.x) {
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t w = 0; w < kDispatchWarps; ++w) {
      const uint32_t here = histogram[w * ex.experts + expert];
      histogram[w * ex.experts + expert] = sum;
      sum += here;
    }
    const uint32_t rank = owners[expert];
    if (rank != kNone)
      out<uint32_t>(ex, rank, step, ex.counts)[piece * ex.most_experts + expert - experts_of(ex, rank).first] = sum;
  }
  __syncthreads();
  for (uint32_t begin = low; begin < high; begin += Batch::kChoices) {
    if (begin != low) load_batch(ex, go, begin, high, batch);
#pragma unroll
    for (uint32_t i = 0; i < Batch::kRounds; ++i) {
      if (begin + i * 32 >= high) break;
      const uint32_t at = begin + i * 32 + lane;
      const bool valid = reachable(batch.experts[i]);
      const uint32_t key = valid ? batch.experts[i] : kNone;
      const uint32_t equal = __match_any_sync(kAll, key);
      const uint32_t before = __popc(equal & ((1u << lane) - 1));
      // One lane counts for all that have its expert; what it finds there reaches them before the next round counts on.
      uint32_t base = 0;
      if (valid && before == 0) base = atomicAdd(&mine[key], __popc(equal));
      base = __shfl_sync(kAll, base, __ffs(equal) - 1);
      if (at >= high) continue;
      const Pair pair{valid ? key << kOrdinalBits | (base + before) : kNone, batch.weights[i]};
      for (uint32_t rank = 0; rank < ex.ranks; ++rank)
        if (ex.present >> rank & 1) out<Pair>(ex, rank, step, ex.pairs)[at] = pair;
    }
  }
  __syncthreads();
  if (threadIdx.x < ex.ranks && ex.present >> threadIdx.x & 1) {
    if (piece == 0) out<Head>(ex, threadIdx.x, step, ex.head)->tokens = tokens;
    store_release(out<uint32_t>(ex, threadIdx.x, step, ex.record_words) + piece, step);
  }
}

}  // namespace moe

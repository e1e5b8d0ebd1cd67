// nodes.cuh: between the two lanes of an exchange by the nodes. A token crosses to a node once, by the lane of the ranks with the same place
// in their nodes; its choices travel with it as words beside its scales. In the node it is dispatched again, by those. A warp for each row.
#pragma once
#include "words.cuh"

namespace moe {

struct NodeStep {
  const void* indices;  // what the caller dispatches
  const float* weights;
  const float* scales;
  const int32_t* count;   // tokens, read when the kernel runs; null: `tokens`
  int32_t* chosen;        // [tokens][nodes]: the node where it has experts of a token, -1 elsewhere
  uint32_t* words;        // [tokens][scales | experts | weights | which token of which rank]: what crosses with it
  const uint32_t* came;   // the same, of the rows that crossed
  const int32_t* rows;    // how many of these
  int32_t* here;          // [rows][top_k]: their experts of this node, -1 for others
  float* here_weights;    // their weights
  uint32_t* here_words;   // [rows][scales | which token of which rank]
  const uint32_t* taken;  // the same, of the rows of this rank's experts
  const int32_t* end;     // how many of these, with padding
  float* row_scales;      // [rows][scales]
  int32_t* source_ranks;
  int32_t* source_tokens;
  uint32_t tokens, wide_indices, experts, ranks, node_size, rank, max_tokens, top_k, scale_words, first_expert,
      node_experts, unused;
};

__device__ inline uint32_t crossing_words(const NodeStep& go) { return go.scale_words + 2 * go.top_k + 1; }

// Before tokens cross: the nodes of each, and what travels with it.
__device__ inline void spread(const NodeStep& go, uint32_t first, uint32_t stride) {
  const uint32_t lane = lane_of(), nodes = go.ranks / go.node_size;
  const uint32_t tokens =
      go.count == nullptr ? go.tokens : static_cast<uint32_t>(max(0, min(*go.count, static_cast<int32_t>(go.tokens))));
  for (uint32_t token = first; token < tokens; token += stride) {
    uint32_t* const words = go.words + static_cast<uint64_t>(token) * crossing_words(go);
    uint32_t bit = 0;
    if (lane < go.top_k) {
      const uint64_t at = static_cast<uint64_t>(token) * go.top_k + lane;
      const int64_t expert =
          go.wide_indices ? static_cast<const int64_t*>(go.indices)[at] : static_cast<const int32_t*>(go.indices)[at];
      const uint32_t rank = rank_of(go.experts, go.ranks, expert);
      bit = rank == kNone ? 0 : 1u << rank / go.node_size;
      words[go.scale_words + lane] = rank == kNone ? kNone : static_cast<uint32_t>(expert);
      words[go.scale_words + go.top_k + lane] = __float_as_uint(go.weights[at]);
    }
    const uint32_t reached = __reduce_or_sync(kAll, bit);
    if (lane < nodes)
      go.chosen[static_cast<uint64_t>(token) * nodes + lane] = reached >> lane & 1 ? static_cast<int32_t>(lane) : -1;
    for (uint32_t i = lane; i < go.scale_words; i += 32)
      words[i] = __float_as_uint(go.scales[static_cast<uint64_t>(token) * go.scale_words + i]);
    if (lane == 0) words[go.scale_words + 2 * go.top_k] = go.rank * go.max_tokens + token;
  }
}

// Between the lanes: of what crossed, that which is for this node.
__device__ inline void unpack(const NodeStep& go, uint32_t first, uint32_t stride) {
  const uint32_t lane = lane_of(), rows = static_cast<uint32_t>(*go.rows);
  for (uint32_t row = first; row < rows; row += stride) {
    const uint32_t* const words = go.came + static_cast<uint64_t>(row) * crossing_words(go);
    uint32_t* const here = go.here_words + static_cast<uint64_t>(row) * (go.scale_words + 1);
    if (lane < go.top_k) {
      const uint64_t at = static_cast<uint64_t>(row) * go.top_k + lane;
      const uint32_t expert = words[go.scale_words + lane], local = expert - go.first_expert;
      go.here[at] = expert != kNone && local < go.node_experts ? static_cast<int32_t>(local) : -1;
      go.here_weights[at] = __uint_as_float(words[go.scale_words + go.top_k + lane]);
    }
    for (uint32_t i = lane; i < go.scale_words; i += 32) here[i] = words[i];
    if (lane == 0) here[go.scale_words] = words[go.scale_words + 2 * go.top_k];
  }
}

// After the second lane: where each row began its way, and its scales by themselves.
__device__ inline void trace(const NodeStep& go, uint32_t first, uint32_t stride) {
  const uint32_t lane = lane_of(), rows = static_cast<uint32_t>(*go.end);
  for (uint32_t row = first; row < rows; row += stride) {
    const uint32_t* const words = go.taken + static_cast<uint64_t>(row) * (go.scale_words + 1);
    for (uint32_t i = lane; i < go.scale_words; i += 32)
      go.row_scales[static_cast<uint64_t>(row) * go.scale_words + i] = __uint_as_float(words[i]);
    if (lane != 0 || go.source_ranks[row] < 0) continue;
    go.source_ranks[row] = static_cast<int32_t>(words[go.scale_words] / go.max_tokens);
    go.source_tokens[row] = static_cast<int32_t>(words[go.scale_words] % go.max_tokens);
  }
}

}  // namespace moe

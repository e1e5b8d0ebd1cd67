// dispatch.cuh: tokens to the ranks of their experts. The first blocks route, a piece of the tokens each: they number each choice among
// the piece's pairs for the expert, so that receivers find rows without sorting. In all other blocks some warps send tokens, one
// copy for each rank, and the rest take what arrives and fan it out into rows grouped by expert. Each token has a word of its own.
#pragma once
#include "words.cuh"

namespace moe {

constexpr uint32_t kSendWarps = 4;
constexpr uint32_t kReceiveWarps = 8;
constexpr uint32_t kDispatchWarps = kSendWarps + kReceiveWarps;
constexpr uint32_t kReceiveBarrier = 1;

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
  uint32_t tokens, wide_indices, roles, unused;
};

__device__ inline uint32_t tokens_of(const Exchange& ex, const Dispatch& go) {
  if (go.count == nullptr) return go.tokens;
  const int32_t count = *go.count;
  return count < 0 ? 0 : min(static_cast<uint32_t>(count), go.tokens);
}

__device__ inline int64_t index_at(const Dispatch& go, uint64_t at) {
  return go.wide_indices ? static_cast<const int64_t*>(go.indices)[at] : static_cast<const int32_t*>(go.indices)[at];
}

// All warps of a block that routes, one piece of the tokens. `histogram`: a row of ex.experts words for each warp, and one of owners.
__device__ inline void send_record(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t piece,
                                   uint32_t* histogram) {
  constexpr uint32_t kBatch = 8;
  const uint32_t tokens = tokens_of(ex, go);
  const uint32_t start = min(piece * piece_tokens(ex), tokens) * ex.top_k;
  const uint32_t choices = min((piece + 1) * piece_tokens(ex), tokens) * ex.top_k - start;
  const uint32_t warp = threadIdx.x / 32, lane = lane_of();
  const uint32_t each = (choices + kDispatchWarps * 32 - 1) / (kDispatchWarps * 32) * 32;
  const uint32_t low = start + min(warp * each, choices), high = start + min((warp + 1) * each, choices);
  uint32_t* const mine = histogram + warp * ex.experts;
  uint32_t* const owners = histogram + kDispatchWarps * ex.experts;
  for (uint32_t i = threadIdx.x; i < kDispatchWarps * ex.experts; i += blockDim.x) histogram[i] = 0;
  for (uint32_t i = threadIdx.x; i < ex.experts; i += blockDim.x) owners[i] = owner_of(ex, i);
  __syncthreads();
  const auto reachable = [&](int64_t expert) { return expert >= 0 && expert < ex.experts && owners[expert] != kNone; };
  for (uint32_t begin = low; begin < high; begin += kBatch * 32) {
    int64_t found[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t at = begin + i * 32 + lane;
      found[i] = at < high ? index_at(go, at) : -1;
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i)
      if (reachable(found[i])) atomicAdd(&mine[found[i]], 1);
  }
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
  for (uint32_t begin = low; begin < high; begin += kBatch * 32) {
    int64_t found[kBatch];
    float weights[kBatch];
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t at = begin + i * 32 + lane;
      found[i] = at < high ? index_at(go, at) : -1;
      weights[i] = at < high ? go.weights[at] : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      if (begin + i * 32 >= high) break;
      const uint32_t at = begin + i * 32 + lane;
      const bool valid = reachable(found[i]);
      const uint32_t key = valid ? static_cast<uint32_t>(found[i]) : kNone;
      const uint32_t equal = __match_any_sync(kAll, key);
      const uint32_t before = __popc(equal & ((1u << lane) - 1));
      // One lane counts for all that have its expert; what it finds there reaches them before the next round counts on.
      uint32_t base = 0;
      if (valid && before == 0) base = atomicAdd(&mine[key], __popc(equal));
      base = __shfl_sync(kAll, base, __ffs(equal) - 1);
      if (at >= high) continue;
      const Pair pair{valid ? key << kOrdinalBits | (base + before) : kNone, weights[i]};
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

// A warp's own place for rows under way, and the barrier by which loads into it end.
struct Stage {
  char* at;
  uint64_t* barrier;
  uint32_t phase;
};

__device__ inline void send_tokens(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t first,
                                   uint32_t stride, Stage stage) {
  const uint32_t tokens = tokens_of(ex, go), lane = lane_of();
  for (uint32_t token = first; token < tokens; token += stride) {
    // Most tokens go somewhere: the row is on its way before that is known.
    const char* const row = go.x + static_cast<uint64_t>(token) * ex.row_bytes;
    if (lane == 0) bulk_load(stage.at, row, ex.stage_bytes, stage.barrier);
    uint32_t bit = 0;
    if (lane < ex.top_k) {
      const uint32_t owner = owner_of(ex, index_at(go, static_cast<uint64_t>(token) * ex.top_k + lane));
      bit = owner == kNone ? 0 : 1u << owner;
    }
    const uint32_t reached = __reduce_or_sync(kAll, bit), far = reached & ~(1u << ex.rank);
    if (lane == 0) go.reached[token] = reached;
    if (far == 0) {
      wait_load(stage.barrier, stage.phase);
      stage.phase ^= 1;
      continue;
    }
    const bool sends = lane < ex.ranks && far >> lane & 1;
    // Where a GPU reaches the other, a token's number is its place; for a proxy rows are packed, in no certain order.
    const bool packs = sends && is_proxied(ex, lane);
    const uint32_t place = packs ? atomicAdd(&ex.state->packed[lane], 1) : token;
    if (packs) go.places[static_cast<uint64_t>(lane) * ex.max_tokens + token] = place;
    char* const target =
        sends ? out<char>(ex, lane, step, ex.slots) + static_cast<uint64_t>(place) * ex.slot_bytes : nullptr;
    if (ex.scales != 0)
      for (uint32_t left = far; left != 0; left &= left - 1) {
        const uint32_t rank = __ffs(left) - 1;
        const uint64_t slot = static_cast<uint64_t>(__shfl_sync(kAll, place, rank)) * ex.slot_bytes + ex.row_bytes;
        float* const scales = reinterpret_cast<float*>(out<char>(ex, rank, step, ex.slots) + slot);
        for (uint32_t i = lane; i < ex.scales; i += 32)
          scales[i] = go.scales[static_cast<uint64_t>(token) * ex.scales + i];
      }
    for (uint32_t at = 0; at < ex.row_bytes; at += ex.stage_bytes) {
      const uint32_t bytes = min(ex.stage_bytes, ex.row_bytes - at);
      if (lane == 0 && at != 0) bulk_load(stage.at, row + at, bytes, stage.barrier);
      wait_load(stage.barrier, stage.phase);
      stage.phase ^= 1;
      if (sends) {
        bulk_store(target + at, stage.at, bytes);
        wait_stage_read<0>();
      }
      __syncwarp();
    }
    if (sends) {
      wait_stores();
      fence_copies();
    }
    __syncwarp();  // the scales that other lanes stored go with the word that this lane releases
    if (packs)
      out<uint32_t>(ex, lane, step, ex.token_words)[token] = place;
    else if (sends)
      store_release(out<uint32_t>(ex, lane, step, ex.token_words) + token, step);
  }
}

// What the receiving warps of a block share. A piece of a rank's tokens is a source of its own: where its rows begin for each expert.
struct Places {
  uint32_t* base;     // [expert][source]
  uint32_t* offsets;  // of experts
  uint32_t tokens[kMaxRanks];
  uint32_t alive;
};

__device__ inline void meet_receivers() {
  asm volatile("bar.sync %0, %1;" ::"n"(kReceiveBarrier), "n"(kReceiveWarps * 32) : "memory");
}

// The token and the source of an item of the receiving warps: in the order in which senders send, the sources in turn.
struct Item {
  uint32_t token, source;
};

__device__ inline Item item_of(const Exchange& ex, uint32_t number) {
  return {number / ex.ranks, (ex.rank + number % ex.ranks) % ex.ranks};
}

// The rows that a source, which is a piece of the tokens of a rank, has for an expert of this rank.
__device__ inline uint32_t rows_from(const Exchange& ex, uint32_t step, uint32_t source, uint32_t expert) {
  const uint32_t rank = source / ex.routers, piece = source % ex.routers;
  if (!(ex.present >> rank & 1)) return 0;
  return in<uint32_t>(ex, rank, step, ex.counts)[piece * ex.most_experts + expert];
}

// Receiving warps of a block; `number` among them. Returns whether all records came.
__device__ inline bool take_records(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t number,
                                    Places& places) {
  const uint32_t lane = lane_of(), thread = number * 32 + lane, sources = ex.ranks * ex.routers;
  const Experts own = experts_of(ex, ex.rank);
  if (number == 0) {
    bool all = true;
    for (uint32_t block = 0; all && block < sources; block += 32) {
      const uint32_t source = block + lane, rank = source / ex.routers;
      const bool mine = source < sources && ex.present >> rank & 1 && !is_proxied(ex, rank);
      const uint32_t* const words = mine ? in<uint32_t>(ex, rank, step, ex.record_words) : nullptr;
      all = await(ex, mine, words + source % ex.routers, step, rank, kRecord);
    }
    places.tokens[lane] =
        all && lane < ex.ranks && ex.present >> lane & 1 ? __ldcg(&in<Head>(ex, lane, step, ex.head)->tokens) : 0;
    if (lane == 0) places.alive = all;
  }
  meet_receivers();
  if (!places.alive) return false;
  for (uint32_t i = thread; i < own.count * sources; i += kReceiveWarps * 32) {
    const uint32_t source = i / own.count, expert = i % own.count;
    places.base[expert * sources + source] = rows_from(ex, step, source, expert);
  }
  meet_receivers();
  if (number == 0) {
    uint32_t begin = 0;
    for (uint32_t block = 0; block < own.count; block += 32) {
      const uint32_t expert = block + lane;
      uint32_t rows = 0;
      if (expert < own.count)
        for (uint32_t source = 0; source < sources; ++source) rows += places.base[expert * sources + source];
      const uint32_t padded = (rows + ex.alignment - 1) / ex.alignment * ex.alignment;
      uint32_t sum = padded;
      for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const uint32_t other = __shfl_up_sync(kAll, sum, distance);
        if (lane >= distance) sum += other;
      }
      if (expert < own.count) {
        uint32_t at = begin + sum - padded;
        places.offsets[expert] = at;
        for (uint32_t source = 0; source < sources; ++source) {
          const uint32_t here = places.base[expert * sources + source];
          places.base[expert * sources + source] = at;
          at += here;
        }
        if (blockIdx.x == ex.routers) go.tokens_per_expert[expert] = rows;
      }
      begin += __shfl_sync(kAll, sum, 31);
    }
    if (lane == 0) places.offsets[own.count] = begin;
    __syncwarp();
    if (blockIdx.x == ex.routers) {
      for (uint32_t i = lane; i <= own.count; i += 32) go.offsets[i] = places.offsets[i];
      if (lane < ex.ranks) go.counts[lane] = places.tokens[lane];
    }
  }
  meet_receivers();
  return true;
}

// The rows between the last of an expert and the first of the next: zeros, of nobody.
__device__ inline void clear_padding(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t first,
                                     uint32_t stride, const Places& places) {
  const Experts own = experts_of(ex, ex.rank);
  const uint32_t lane = lane_of();
  for (uint32_t expert = first; expert < own.count; expert += stride) {
    uint32_t rows = 0;
    for (uint32_t source = lane; source < ex.ranks * ex.routers; source += 32)
      rows += rows_from(ex, step, source, expert);
    rows = __reduce_add_sync(kAll, rows);
    for (uint32_t row = places.offsets[expert] + rows; row < places.offsets[expert + 1]; ++row) {
      uint4* const at = reinterpret_cast<uint4*>(go.rows + static_cast<uint64_t>(row) * ex.row_bytes);
      for (uint32_t i = lane; i < ex.row_bytes / 16; i += 32) at[i] = uint4{};
      for (uint32_t i = lane; i < ex.scales; i += 32) go.row_scales[static_cast<uint64_t>(row) * ex.scales + i] = 0;
      if (lane == 0) go.source_ranks[row] = go.source_tokens[row] = go.source_choices[row] = -1;
    }
  }
}

__device__ inline void take_tokens(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t first,
                                   uint32_t stride, Stage stage, const Places& places) {
  const Experts own = experts_of(ex, ex.rank);
  const uint32_t lane = lane_of();
  const uint32_t piece = piece_tokens(ex);
  uint32_t most = 0;
  for (uint32_t rank = 0; rank < ex.ranks; ++rank) most = max(most, places.tokens[rank]);
  for (uint32_t number = first; number < most * ex.ranks; number += stride) {
    const auto [token, source] = item_of(ex, number);
    if (token >= places.tokens[source]) continue;
    const bool far = source != ex.rank, packed = is_proxied(ex, source);
    const uint64_t slot = static_cast<uint64_t>(source) * ex.max_tokens + token;
    Pair pair{kNone, 0};
    if (lane < ex.top_k) pair = in<Pair>(ex, source, step, ex.pairs)[static_cast<uint64_t>(token) * ex.top_k + lane];
    const uint32_t place = packed ? in<uint32_t>(ex, source, step, ex.token_words)[token] : token;
    const uint32_t expert = (pair.place >> kOrdinalBits) - own.first;
    const bool local = pair.place != kNone && expert < own.count;
    uint32_t row = kNone;
    if (local)
      row = places.base[(expert * ex.ranks + source) * ex.routers + token / piece] +
            (pair.place & ((1u << kOrdinalBits) - 1));
    if (lane < ex.top_k) go.pairs[slot * ex.top_k + lane] = Pair{row, pair.weight};
    if (packed && lane == 0) go.places[static_cast<uint64_t>(ex.ranks) * ex.max_tokens + slot] = place;
    const uint32_t wanted = __ballot_sync(kAll, local);
    if (wanted == 0) continue;
    if (far && !packed &&
        !await(ex, lane == 0, in<uint32_t>(ex, source, step, ex.token_words) + token, step, source, kToken))
      break;
    const char* const from = far ? in<char>(ex, source, step, ex.slots) + static_cast<uint64_t>(place) * ex.slot_bytes
                                 : go.x + static_cast<uint64_t>(token) * ex.row_bytes;
    if (lane == 0) {
      fence_copies();
      bulk_load(stage.at, from, ex.stage_bytes, stage.barrier);
    }
    const float* const scales = far ? reinterpret_cast<const float*>(from + ex.row_bytes)
                                    : go.scales + static_cast<uint64_t>(token) * ex.scales;
    for (uint32_t left = wanted; ex.scales != 0 && left != 0; left &= left - 1) {
      const uint64_t to = static_cast<uint64_t>(__shfl_sync(kAll, row, __ffs(left) - 1)) * ex.scales;
      for (uint32_t i = lane; i < ex.scales; i += 32) go.row_scales[to + i] = __ldcg(scales + i);
    }
    if (local) {
      go.source_ranks[row] = static_cast<int32_t>(source);
      go.source_tokens[row] = static_cast<int32_t>(token);
      go.source_choices[row] = static_cast<int32_t>(lane);
    }
    for (uint32_t at = 0; at < ex.row_bytes; at += ex.stage_bytes) {
      const uint32_t bytes = min(ex.stage_bytes, ex.row_bytes - at);
      if (lane == 0 && at != 0) bulk_load(stage.at, from + at, bytes, stage.barrier);
      wait_load(stage.barrier, stage.phase);
      stage.phase ^= 1;
      if (local) {
        bulk_store(go.rows + static_cast<uint64_t>(row) * ex.row_bytes + at, stage.at, bytes);
        wait_stage_read<0>();
      }
      __syncwarp();
    }
  }
  wait_stores();
}

__device__ inline void dispatch(const Exchange& ex, const Dispatch& go, char* shared) {
  __shared__ Places places;
  __shared__ uint64_t barriers[kDispatchWarps];
  __shared__ uint32_t steps[2];
  __shared__ bool broken;
  const uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    broken = is_broken(ex);  // one answer for the whole block
    steps[0] = step_now(ex, kDispatchSend);
    steps[1] = step_now(ex, kDispatchReceive);
    places.base = reinterpret_cast<uint32_t*>(shared + kDispatchWarps * ex.stage_bytes);
    places.offsets = places.base + ex.most_experts * ex.ranks * ex.routers;
  }
  if (lane_of() == 0) open_barrier(&barriers[warp]);
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) {
    if (go.roles & kSend) pass_step(ex, kDispatchSend, steps[0]);
    if (go.roles & kReceive) pass_step(ex, kDispatchReceive, steps[1]);
  }
  if (broken) return;
  if (blockIdx.x < ex.routers) {
    if (go.roles & kSend) send_record(ex, go, steps[0], blockIdx.x, reinterpret_cast<uint32_t*>(shared));
    return;
  }
  const Stage stage{shared + warp * ex.stage_bytes, &barriers[warp], 0};
  const uint32_t workers = gridDim.x - ex.routers, worker = blockIdx.x - ex.routers;
  if (warp < kSendWarps) {
    if (go.roles & kSend) send_tokens(ex, go, steps[0], warp * workers + worker, kSendWarps * workers, stage);
    return;
  }
  if (!(go.roles & kReceive)) return;
  const uint32_t number = warp - kSendWarps, stride = kReceiveWarps * workers;
  const uint32_t first = (kReceiveWarps - 1 - number) * workers + worker;
  if (!take_records(ex, go, steps[1], number, places)) return;
  take_tokens(ex, go, steps[1], first, stride, stage, places);
  clear_padding(ex, go, steps[1], first, stride, places);
}

}  // namespace moe

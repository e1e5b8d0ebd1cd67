// dispatch.cuh: tokens to the ranks of their experts. The first blocks route (route.cuh). In all other blocks some warps send tokens, one
// copy for each rank, and the rest take what arrives and fan it out into rows grouped by expert. Each token has a word of its own.
#pragma once
#include "cast.cuh"
#include "route.cuh"

namespace moe {

constexpr uint32_t kReceiveBarrier = 1, kSendBarrier = 2;  // the latter: of the first group of warps
constexpr uint32_t kScalesInHand = 2;  // of a lane: those of a row of 8,192 elements and 128 for each scale

// A warp's own place for rows under way, and the barrier by which loads into it end.
struct Stage {
  char* at;
  uint64_t* barrier;
  uint32_t phase;
};

// Tokens that are cast go to this rank's own experts by way of its own inbox, as those of others do.
__device__ inline bool comes_by_inbox(const Exchange& ex, const Dispatch& go, uint32_t source) {
  return source != ex.rank || go.cast != kAsTheyAre;
}

// How many warps of a block cast a part of each token together: as many as tokens leave free.
__device__ inline uint32_t casting_together(uint32_t tokens, uint32_t workers, uint32_t blocks) {
  uint32_t together = 1;
  while (together < kSendWarps && workers * kSendWarps >= 2 * together * tokens && 2 * together <= blocks)
    together *= 2;
  return together;
}

__device__ inline void send_tokens(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t warp,
                                   uint32_t worker, uint32_t workers, Stage stage) {
  const uint32_t tokens = tokens_of(ex, go), lane = lane_of();
  const bool casts = go.cast != kAsTheyAre;
  const uint32_t given_bytes = casts ? 2 * ex.row_bytes : ex.row_bytes;
  const uint32_t blocks = given_bytes / kCastBytes, together = casts ? casting_together(tokens, workers, blocks) : 1;
  const uint32_t group = warp / together, part = warp % together;
  const uint32_t low = blocks * part / together * kCastBytes;
  const uint32_t high = part + 1 < together ? blocks * (part + 1) / together * kCastBytes : given_bytes;
  const uint32_t chunk = min(ex.stage_bytes, high - low), stride = kSendWarps / together * workers;
  for (uint32_t token = group * workers + worker; token < tokens; token += stride) {
    // Most tokens go somewhere: the row is on its way before that is known.
    const char* const row = go.x + static_cast<uint64_t>(token) * given_bytes;
    if (lane == 0) bulk_load(stage.at, row + low, chunk, stage.barrier);
    uint32_t bit = 0;
    if (lane < ex.top_k) {
      const uint32_t owner = owner_of(ex, index_at(go, static_cast<uint64_t>(token) * ex.top_k + lane));
      bit = owner == kNone ? 0 : 1u << owner;
    }
    const uint32_t reached = __reduce_or_sync(kAll, bit), far = casts ? reached : reached & ~(1u << ex.rank);
    if (lane == 0 && part == 0) go.reached[token] = reached;
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
    // Scales from number `begin` on, for all ranks: `scale` of each lane, as far as they are below `end`.
    const auto send_scales = [&](uint32_t begin, uint32_t end, float scale) {
      for (uint32_t left = far; left != 0; left &= left - 1) {
        const uint32_t rank = __ffs(left) - 1;
        const uint64_t slot = static_cast<uint64_t>(__shfl_sync(kAll, place, rank)) * ex.slot_bytes + ex.row_bytes;
        float* const scales = reinterpret_cast<float*>(out<char>(ex, rank, step, ex.slots) + slot);
        if (begin + lane < end) scales[begin + lane] = scale;
      }
    };
    for (uint32_t begin = 0; !casts && begin < ex.scales; begin += 32) {
      const uint32_t i = begin + lane;
      send_scales(begin, ex.scales, i < ex.scales ? go.scales[static_cast<uint64_t>(token) * ex.scales + i] : 0);
    }
    for (uint32_t at = low; at < high; at += chunk) {
      const uint32_t bytes = min(chunk, high - at);
      if (lane == 0 && at != low) bulk_load(stage.at, row + at, bytes, stage.barrier);
      wait_load(stage.barrier, stage.phase);
      stage.phase ^= 1;
      if (casts) {
        const StageScales scales = cast_stage(stage.at, bytes, go.cast == kPowersOfTwo);
        const uint32_t begin = at / kCastBytes, end = (at + bytes) / kCastBytes;
        send_scales(begin, end, scales.first);
        send_scales(begin + 32, end, scales.second);
      }
      if (sends) {
        bulk_store(target + (casts ? at / 2 : at), stage.at, casts ? bytes / 2 : bytes);
        wait_stage_read<0>();
      }
      __syncwarp();
    }
    if (sends) {
      wait_stores();
      fence_global_copies();
    }
    __syncwarp();  // the scales that other lanes stored go with the word that this lane releases
    if (together > 1) {
      asm volatile("bar.sync %0, %1;" ::"r"(kSendBarrier + group), "r"(together * 32) : "memory");
      if (part != 0) continue;
    }
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
  uint32_t sums[kReceiveWarps];
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
  if (number == 0) {
    int64_t* const waited = blockIdx.x == ex.routers ? go.waited : nullptr;
    const uint32_t sources = ex.ranks * ex.routers;
    bool all = true;
    for (uint32_t block = 0; all && block < sources; block += 32) {
      const uint32_t source = block + lane_of(), rank = source / ex.routers;
      const bool mine = source < sources && ex.present >> rank & 1 && !is_proxied(ex, rank);
      const uint32_t* const words = mine ? in<uint32_t>(ex, rank, step, ex.record_words) : nullptr;
      const auto ready = [&] { return load_acquire(words + source % ex.routers) == step; };
      all = await(ex, mine, rank, kRecord, ready, waited);
    }
    if (lane_of() == 0) places.alive = all;
  }
  meet_receivers();
  return places.alive;
}

// One thread: which of the rows of an expert are of which rank. `base`: where those of each source begin, counted from its first.
__device__ inline void put_ranges(const Exchange& ex, const Dispatch& go, uint32_t expert, const uint32_t* base,
                                  uint32_t rows) {
  for (uint32_t rank = 0; rank < ex.ranks; ++rank) {
    const uint32_t begin = base[rank * ex.routers];
    const uint32_t end = rank + 1 < ex.ranks ? base[(rank + 1) * ex.routers] : rows;
    go.ranges[static_cast<uint64_t>(expert) * ex.ranks + rank] =
        static_cast<int64_t>(static_cast<uint64_t>(begin) << 32 | (end - begin));
  }
}

// Receiving warps of a block: works out where the rows of each (expert, source) begin. A thread has an expert.
__device__ inline void place_rows(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t number,
                                  Places& places) {
  constexpr uint32_t kBatch = 8;
  const uint32_t lane = lane_of(), sources = ex.ranks * ex.routers;
  const Experts own = experts_of(ex, ex.rank);
  if (number == kReceiveWarps - 1)
    places.tokens[lane] =
        lane < ex.ranks && ex.present >> lane & 1 ? __ldcg(&in<Head>(ex, lane, step, ex.head)->tokens) : 0;
  uint32_t begin = 0, block = 0;
  do {  // also without experts: the end is 0 then
    const uint32_t expert = block + number * 32 + lane;
    uint32_t* const base = places.base + expert * sources;
    uint32_t rows = 0;
    for (uint32_t source = 0; expert < own.count && source < sources; source += kBatch) {
      uint32_t here[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i)
        here[i] = source + i < sources ? rows_from(ex, step, source + i, expert) : 0;
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        if (source + i < sources) base[source + i] = rows;
        rows += here[i];
      }
    }
    const uint32_t padded = (rows + ex.alignment - 1) / ex.alignment * ex.alignment;
    uint32_t sum = padded;
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) places.sums[number] = sum;
    meet_receivers();
    uint32_t at = begin + sum - padded;
    for (uint32_t warp = 0; warp < kReceiveWarps; ++warp) {
      if (warp < number) at += places.sums[warp];
      begin += places.sums[warp];
    }
    if (ex.slot_rows != 0) at = expert * ex.slot_rows, begin = own.count * ex.slot_rows;
    if (expert < own.count) {
      if (ex.slot_rows != 0 && blockIdx.x == ex.routers) put_ranges(ex, go, expert, base, rows);
      places.offsets[expert] = at;
      for (uint32_t source = 0; source < sources; ++source) base[source] += at;
      if (blockIdx.x == ex.routers) go.tokens_per_expert[expert] = ex.slot_rows != 0 ? min(rows, ex.slot_rows) : rows;
    }
    if (number == 0 && lane == 0) places.offsets[own.count] = begin;
    meet_receivers();
    block += kReceiveWarps * 32;
  } while (block < own.count);
  if (blockIdx.x != ex.routers) return;
  for (uint32_t i = number * 32 + lane; i <= own.count; i += kReceiveWarps * 32) go.offsets[i] = places.offsets[i];
  if (number == 0 && lane < ex.ranks) go.counts[lane] = places.tokens[lane];
}

// The rows between the last of an expert and the first of the next: zeros, of nobody. What is behind the last row in slots is anything.
__device__ inline void clear_padding(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t first,
                                     uint32_t stride, const Places& places) {
  if (ex.slot_rows != 0) return;
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

// What a receiving warp finds out about a token before it is known where rows begin. Of lanes: each has a choice.
struct Coming {
  Pair pair;
  uint32_t place;   // which row of the parcel it is
  uint32_t wanted;  // lanes whose expert is here; 0: nothing to do
  bool starts;      // on its way to the stage
  float scales[kScalesInHand];
};

__device__ inline const char* row_of(const Exchange& ex, const Dispatch& go, uint32_t step, const Item& item,
                                     uint32_t place) {
  if (!comes_by_inbox(ex, go, item.source)) return go.x + static_cast<uint64_t>(item.token) * ex.row_bytes;
  return in<char>(ex, item.source, step, ex.slots) + static_cast<uint64_t>(place) * ex.slot_bytes;
}

__device__ inline const float* scales_of(const Exchange& ex, const Dispatch& go, const Item& item, const char* row) {
  if (!comes_by_inbox(ex, go, item.source)) return go.scales + static_cast<uint64_t>(item.token) * ex.scales;
  return reinterpret_cast<const float*>(row + ex.row_bytes);
}

// The scales of a row that is there: loads the first of them, which `put_scales` stores when rows are under way.
__device__ inline void load_scales(const Exchange& ex, const float* from, Coming& coming) {
#pragma unroll
  for (uint32_t i = 0; i < kScalesInHand; ++i) {
    const uint32_t at = i * 32 + lane_of();
    coming.scales[i] = at < ex.scales ? __ldcg(from + at) : 0;
  }
}

// Scales of a row lie beside each other; in slots each lies beside those of the expert's other rows, as the matrix libraries of callers
// want it: a store for each. `row` and `expert`: of the choice of each lane.
__device__ inline void put_scales(const Exchange& ex, const Dispatch& go, const float* from, const Coming& coming,
                                  uint32_t expert, uint32_t row) {
  const uint32_t unit = ex.slot_rows != 0 ? ex.slot_rows : 1;
  const uint64_t first = ex.slot_rows != 0 ? static_cast<uint64_t>(expert) * (ex.scales - 1) * ex.slot_rows + row
                                           : static_cast<uint64_t>(row) * ex.scales;
#pragma unroll 1
  for (uint32_t begin = 0; begin < ex.scales; begin += 32) {
    const uint32_t at = begin + lane_of();
    float scale = begin == 0 ? coming.scales[0] : coming.scales[1];
    if (begin >= kScalesInHand * 32) scale = at < ex.scales ? __ldcg(from + at) : 0;
    for (uint32_t left = coming.wanted; left != 0; left &= left - 1) {
      const uint64_t to = __shfl_sync(kAll, first, __ffs(left) - 1);
      if (at < ex.scales) go.row_scales[to + static_cast<uint64_t>(at) * unit] = scale;
    }
  }
}

// Records are there. Waits for nothing: a token that has come, as it mostly has, is loaded.
__device__ inline Coming look_at(const Exchange& ex, const Dispatch& go, uint32_t step, const Item& item, Stage stage) {
  const auto [token, source] = item;
  Coming coming{{kNone, 0}, token, 0, false};
  if (token >= ex.max_tokens || !(ex.present >> source & 1)) return coming;
  const bool far = comes_by_inbox(ex, go, source), packed = is_proxied(ex, source);
  const uint32_t* const word = in<uint32_t>(ex, source, step, ex.token_words) + token;
  // All at once: the pairs of a token that there is not are not used.
  if (lane_of() < ex.top_k)
    coming.pair = in<Pair>(ex, source, step, ex.pairs)[static_cast<uint64_t>(token) * ex.top_k + lane_of()];
  const uint32_t tokens = __ldcg(&in<Head>(ex, source, step, ex.head)->tokens);
  if (packed) coming.place = *word;
  const bool came = !far || packed || load_acquire(word) == step;
  const Experts own = experts_of(ex, ex.rank);
  const bool local = coming.pair.place != kNone && (coming.pair.place >> kOrdinalBits) - own.first < own.count;
  coming.wanted = __ballot_sync(kAll, local && token < tokens);
  coming.starts = __all_sync(kAll, came) && coming.wanted != 0;
  if (coming.starts && lane_of() == 0) {
    fence_global_copies();
    bulk_load(stage.at, row_of(ex, go, step, item, coming.place), min(ex.stage_bytes, ex.row_bytes), stage.barrier);
  }
  if (coming.starts) load_scales(ex, scales_of(ex, go, item, row_of(ex, go, step, item, coming.place)), coming);
  return coming;
}

__device__ inline void take_tokens(const Exchange& ex, const Dispatch& go, uint32_t step, uint32_t first,
                                   uint32_t stride, Coming coming, Stage stage, const Places& places) {
  const uint32_t lane = lane_of(), own_first = experts_of(ex, ex.rank).first, piece = piece_tokens(ex);
  uint32_t most = 0;
  for (uint32_t rank = 0; rank < ex.ranks; ++rank) most = max(most, places.tokens[rank]);
  for (uint32_t number = first; number < most * ex.ranks; number += stride) {
    const Item item = item_of(ex, number);
    const auto [token, source] = item;
    if (token >= places.tokens[source]) continue;
    if (number != first) coming = look_at(ex, go, step, item, stage);
    const uint64_t slot = static_cast<uint64_t>(source) * ex.max_tokens + token;
    bool local = coming.wanted >> lane & 1;
    const uint32_t expert = (coming.pair.place >> kOrdinalBits) - own_first;
    uint32_t row = kNone;
    if (local)
      row = places.base[(expert * ex.ranks + source) * ex.routers + token / piece] +
            (coming.pair.place & ((1u << kOrdinalBits) - 1));
    if (ex.slot_rows != 0) {  // an expert that tokens name more than once may have more rows than slots
      if (local && row >= (expert + 1) * ex.slot_rows) local = false, row = kNone;
      coming.wanted = __ballot_sync(kAll, local);
    }
    if (lane < ex.top_k) go.pairs[slot * ex.top_k + lane] = Pair{row, coming.pair.weight};
    if (is_proxied(ex, source) && lane == 0)
      go.places[static_cast<uint64_t>(ex.ranks) * ex.max_tokens + slot] = coming.place;
    if (coming.wanted == 0) {
      if (coming.starts) {
        wait_load(stage.barrier, stage.phase);
        stage.phase ^= 1;
      }
      continue;
    }
    const char* const from = row_of(ex, go, step, item, coming.place);
    if (!coming.starts) {
      const uint32_t* const word = in<uint32_t>(ex, source, step, ex.token_words) + token;
      if (!await(ex, lane == 0, word, step, source, kToken)) break;
      if (lane == 0) {
        fence_global_copies();
        bulk_load(stage.at, from, min(ex.stage_bytes, ex.row_bytes), stage.barrier);
      }
      load_scales(ex, scales_of(ex, go, item, from), coming);
    }
    const float* const scales = scales_of(ex, go, item, from);
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
      if (local) bulk_store(go.rows + static_cast<uint64_t>(row) * ex.row_bytes + at, stage.at, bytes);
      if (at == 0) put_scales(ex, go, scales, coming, expert, row);
      if (local) wait_stage_read<0>();
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
  const bool routes = blockIdx.x < ex.routers;
  Share share{};
  Batch batch;
  if (routes && go.roles & kSend) {
    share = share_of(ex, go, blockIdx.x);
    load_batch(ex, go, share.low, share.high, batch);
  }
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) {
    if (go.roles & kSend) pass_step(ex, kDispatchSend, steps[0]);
    if (go.roles & kReceive) pass_step(ex, kDispatchReceive, steps[1]);
  }
  if (broken) return;
  if (routes) {
    if (go.roles & kSend) send_record(ex, go, steps[0], blockIdx.x, share, batch, reinterpret_cast<uint32_t*>(shared));
    return;
  }
  const Stage stage{shared + warp * ex.stage_bytes, &barriers[warp], 0};
  const uint32_t workers = gridDim.x - ex.routers, worker = blockIdx.x - ex.routers;
  if (warp < kSendWarps) {
    if (go.roles & kSend) send_tokens(ex, go, steps[0], warp, worker, workers, stage);
    return;
  }
  if (!(go.roles & kReceive)) return;
  const uint32_t number = warp - kSendWarps, stride = kReceiveWarps * workers;
  const uint32_t first = (kReceiveWarps - 1 - number) * workers + worker;
  if (!take_records(ex, go, steps[1], number, places)) return;
  const Coming coming = look_at(ex, go, steps[1], item_of(ex, first), stage);
  place_rows(ex, go, steps[1], number, places);
  take_tokens(ex, go, steps[1], first, stride, coming, stage, places);
  clear_padding(ex, go, steps[1], first, stride, places);
}

}  // namespace moe

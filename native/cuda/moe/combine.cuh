// combine.cuh: outputs of experts back to the ranks of their tokens. At the experts' rank the rows of a token are weighted and added up in
// fp32 in the order of its choices and rounded once; at the token's rank the sums of the ranks are added up in fp32, beginning with
// its own and going round the circle (MOE-3). Products are rounded before they are added. Rows may be cut in parts, for few tokens.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "words.cuh"

namespace moe {

constexpr uint32_t kBackWarps = 8;  // sending, and as many receiving
constexpr uint32_t kCombineWarps = 2 * kBackWarps;
constexpr uint32_t kColumns = 4;  // vectors of 16 bytes of a row that a lane has in hand
constexpr uint32_t kExperts = 2;  // rows
constexpr uint32_t kRing = 4;     // blocks of a warp on their way out
constexpr uint32_t kBlockBytes = kColumns * 32 * 16;

struct Combine {
  const char* expert_rows;
  char* y;
  const Pair* pairs;
  const uint32_t* reached;
  const uint32_t* counts;
  const uint32_t* places;  // as in Dispatch
  const float* weights;    // of the own tokens, [tokens][top_k], where they are known only now
  int64_t* waited;         // [ranks]: nanoseconds of waiting for the weights of each are added; null: not wanted
  uint32_t roles, unused;
};

template <typename T>
struct Vector;  // 16 bytes as floats and back
template <>
struct Vector<float> {
  static constexpr uint32_t kWidth = 4;
  static __device__ void open(const uint4& bits, float* out) {
    out[0] = __uint_as_float(bits.x), out[1] = __uint_as_float(bits.y);
    out[2] = __uint_as_float(bits.z), out[3] = __uint_as_float(bits.w);
  }
  static __device__ uint4 close(const float* in) {
    return {__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3])};
  }
};
template <>
struct Vector<__nv_bfloat16> {
  static constexpr uint32_t kWidth = 8;
  static __device__ void open(const uint4& bits, float* out) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  static __device__ uint4 close(const float* in) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(two);
    }
    return {words[0], words[1], words[2], words[3]};
  }
};
template <>
struct Vector<__half> {
  static constexpr uint32_t kWidth = 8;
  static __device__ void open(const uint4& bits, float* out) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      out[2 * i] = two.x, out[2 * i + 1] = two.y;
    }
  }
  static __device__ uint4 close(const float* in) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 two = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(two);
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

// Adds the weighted rows of a token's experts here; all lanes, which have one choice each. Columns at `at` and each 32 further. `weigh` sees
// to it that the pair has its weight, when the first rows are under way; false: it never will.
template <typename T, typename Weigh>
__device__ inline bool add_experts(const Exchange& ex, const Combine& go, const Pair& pair, uint32_t at, uint32_t end,
                                   float (*sums)[Vector<T>::kWidth], Weigh weigh) {
  constexpr uint32_t kWidth = Vector<T>::kWidth;
  uint32_t left = __ballot_sync(kAll, pair.place != kNone);
  while (left != 0) {
    // Some experts at once: their loads are under way together, the sums stay in order.
    uint4 bits[kExperts][kColumns];
    uint32_t choices[kExperts];
    const uint32_t many = min(__popc(left), kExperts);
#pragma unroll
    for (uint32_t i = 0; i < kExperts; ++i) {
      if (i == many) break;
      choices[i] = __ffs(left) - 1;
      left &= left - 1;
      const uint64_t row = __shfl_sync(kAll, pair.place, choices[i]);
      const uint4* const from = reinterpret_cast<const uint4*>(go.expert_rows + row * ex.back_row_bytes);
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) bits[i][c] = at + c * 32 < end ? __ldcs(from + at + c * 32) : uint4{};
    }
    if (!weigh()) return false;
#pragma unroll
    for (uint32_t i = 0; i < kExperts; ++i) {
      if (i == many) break;
      const float weight = __shfl_sync(kAll, pair.weight, choices[i]);
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) {
        float values[kWidth];
        Vector<T>::open(bits[i][c], values);
#pragma unroll
        for (uint32_t e = 0; e < kWidth; ++e) sums[c][e] = __fadd_rn(sums[c][e], __fmul_rn(values[e], weight));
      }
    }
  }
  return true;
}

struct Span {
  uint32_t begin, end;
};

__device__ inline Span span_of(const Exchange& ex, uint32_t number) {  // vectors of one part of a row
  const uint32_t vectors = ex.back_row_bytes / 16;
  return {vectors * number / ex.parts, vectors * (number + 1) / ex.parts};
}

// A part of the sum for a token of a source; sums of other ranks' tokens in turn.
struct Piece {
  uint32_t number, source, token;
};

__device__ inline Piece piece_to_send(const Exchange& ex, uint32_t item) {
  const uint32_t place = item / ex.parts, others = ex.ranks - 1;
  return {item % ex.parts, (ex.rank + 1 + place % others) % ex.ranks, place / others};
}

__device__ inline Piece piece_to_take(const Exchange& ex, uint32_t item) {
  return {item % ex.parts, ex.rank, item / ex.parts};
}

__device__ inline Pair pair_of(const Exchange& ex, const Combine& go, const Piece& piece) {
  const uint64_t slot = static_cast<uint64_t>(piece.source) * ex.max_tokens + piece.token;
  return lane_of() < ex.top_k ? go.pairs[slot * ex.top_k + lane_of()] : Pair{kNone, 0};
}

// Receiving warps of the first blocks, a block for each other rank: the weights of the own tokens to the ranks of their experts, each with
// the step's number in one word, so that nothing has to be there before another thing. The next weights of this turn are stored after a later
// dispatch has had the routes of all ranks, which follow what they read here (MOE-1).
__device__ inline void send_weights(const Exchange& ex, const Combine& go, uint32_t step, uint32_t tokens) {
  const uint32_t thread = threadIdx.x - kBackWarps * 32;
  for (uint32_t number = blockIdx.x; number < ex.ranks - 1; number += gridDim.x) {
    const uint32_t rank = (ex.rank + 1 + number) % ex.ranks;
    if (!(ex.present >> rank & 1)) continue;
    uint64_t* const target = out<uint64_t>(ex, rank, step, ex.late_weights);
#pragma unroll 4
    for (uint32_t i = thread; i < tokens * ex.top_k; i += kBackWarps * 32)
      store_relaxed(target + i, static_cast<uint64_t>(step) << 32 | __float_as_uint(go.weights[i]));
  }
}

// Where the weight of a choice of a token of another rank comes, as stored by `send_weights`.
__device__ inline const uint64_t* late_weight(const Exchange& ex, uint32_t step, uint32_t source, uint32_t token,
                                              uint32_t choice) {
  return in<uint64_t>(ex, source, step, ex.late_weights) + static_cast<uint64_t>(token) * ex.top_k + choice;
}

// Whole warp: waits until each lane whose choice is here has the weight that comes in this combine.
__device__ inline bool take_weights(const Exchange& ex, uint32_t step, const Piece& piece, Pair& pair) {
  const uint64_t* const word = late_weight(ex, step, piece.source, piece.token, lane_of());
  const auto ready = [&] {
    const uint64_t came = load_relaxed(word);
    pair.weight = __uint_as_float(static_cast<uint32_t>(came));
    return came >> 32 == step;
  };
  return wait_until(ex, pair.place != kNone, piece.source, kWeights, ready, [] { return false; });
}

// One warp: waits for the last weight of each rank that has tokens, and adds the nanoseconds to its number in `waited`.
__device__ inline bool time_weights(const Exchange& ex, const Combine& go, uint32_t step, uint32_t tokens, bool other) {
  const bool mine = other && tokens != 0;
  const uint64_t* const word = mine ? late_weight(ex, step, lane_of(), tokens - 1, ex.top_k - 1) : nullptr;
  return await(ex, mine, lane_of(), kWeights, [&] { return load_relaxed(word) >> 32 == step; }, go.waited);
}

// What a warp reads before it knows the step, all at once: tokens of each rank, and the pairs of its first piece if there is one.
struct Ahead {
  uint32_t counts;
  Pair pair;
};

__device__ inline Ahead look_ahead(const Exchange& ex, const Combine& go, bool sends, uint32_t first) {
  Ahead ahead{lane_of() < ex.ranks ? go.counts[lane_of()] : 0, {kNone, 0}};
  if (first < (sends ? ex.ranks - 1 : 1) * ex.max_tokens * ex.parts)
    ahead.pair = pair_of(ex, go, sends ? piece_to_send(ex, first) : piece_to_take(ex, first));
  return ahead;
}

template <typename T, bool kLate>
__device__ inline void send_sums(const Exchange& ex, const Combine& go, uint32_t step, uint32_t first, uint32_t stride,
                                 const Ahead& ahead, char* ring) {
  constexpr uint32_t kWidth = Vector<T>::kWidth;
  const uint32_t lane = lane_of(), others = ex.ranks - 1;
  const uint32_t most = __reduce_max_sync(kAll, lane == ex.rank ? 0 : ahead.counts);
  uint32_t filled = 0;
  for (uint32_t item = first; item < most * others * ex.parts; item += stride) {
    const Piece piece = piece_to_send(ex, item);
    const auto [number, source, token] = piece;
    if (token >= __shfl_sync(kAll, ahead.counts, source)) continue;
    Pair pair = item == first ? ahead.pair : pair_of(ex, go, piece);
    bool has_weight = !kLate;
    const auto weigh = [&] { return has_weight || (has_weight = take_weights(ex, step, piece, pair)); };
    const uint64_t slot = static_cast<uint64_t>(source) * ex.max_tokens + token;
    if (__ballot_sync(kAll, pair.place != kNone) == 0) continue;
    const bool packed = is_proxied(ex, source);
    const uint64_t sum_row = packed ? go.places[static_cast<uint64_t>(ex.ranks) * ex.max_tokens + slot] : token;
    char* const target = out<char>(ex, source, step, ex.back) + sum_row * ex.back_row_bytes;
    const Span span = span_of(ex, number);
    for (uint32_t at = span.begin; at < span.end; at += kColumns * 32) {
      float sums[kColumns][kWidth] = {};
      if (!add_experts<T>(ex, go, pair, at + lane, span.end, sums, weigh)) return;
      if (ex.parts > 1) {
        // Parts are small and few: straight from registers. A copy would cost a second way over the wire before the word.
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c)
          if (at + c * 32 + lane < span.end)
            reinterpret_cast<uint4*>(target)[at + c * 32 + lane] = Vector<T>::close(sums[c]);
        continue;
      }
      uint4* const block = reinterpret_cast<uint4*>(ring + filled++ % kRing * kBlockBytes);
      if (lane == 0) wait_stage_read<kRing - 1>();
      __syncwarp();
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c) block[c * 32 + lane] = Vector<T>::close(sums[c]);
      fence_copies();  // warps that wait here for all that they have under way take less time together
      __syncwarp();
      if (lane == 0) bulk_store(target + at * 16, block, min(kColumns * 32, span.end - at) * 16);
    }
    __syncwarp();  // what other lanes stored goes with the word that the first releases
    if (lane == 0) {
      if (ex.parts == 1) {
        wait_stores();
        fence_global_copies();
      }
      if (!packed) store_release(out<uint32_t>(ex, source, step, ex.back_words) + token * ex.parts + number, step);
    }
    __syncwarp();
  }
}

template <typename T, bool kLate>
__device__ inline void take_sums(const Exchange& ex, const Combine& go, uint32_t step, uint32_t first, uint32_t stride,
                                 const Ahead& ahead) {
  constexpr uint32_t kWidth = Vector<T>::kWidth;
  const uint32_t lane = lane_of(), tokens = __shfl_sync(kAll, ahead.counts, ex.rank);
  for (uint32_t item = first; item < tokens * ex.parts; item += stride) {
    const Piece piece = piece_to_take(ex, item);
    const auto [number, source, token] = piece;
    const uint32_t reached = go.reached[token] & ex.present;
    const bool mine = lane < ex.ranks && lane != ex.rank && reached >> lane & 1 && !is_proxied(ex, lane);
    const uint32_t* const words = mine ? in<uint32_t>(ex, lane, step, ex.back_words) : nullptr;
    Pair pair = item == first ? ahead.pair : pair_of(ex, go, piece);
    if (kLate && pair.place != kNone) pair.weight = go.weights[static_cast<uint64_t>(token) * ex.top_k + lane];
    const Span span = span_of(ex, number);
    uint4* const y = reinterpret_cast<uint4*>(go.y + static_cast<uint64_t>(token) * ex.back_row_bytes);
    for (uint32_t at = span.begin + lane; at - lane < span.end; at += kColumns * 32) {
      float total[kColumns][kWidth] = {};
      if (reached >> ex.rank &
          1) {  // the circle begins here: what is added up becomes the first sum, rounded like any other
        add_experts<T>(ex, go, pair, at, span.end, total, [] { return true; });
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c) {
          Vector<T>::open(Vector<T>::close(total[c]), total[c]);
#pragma unroll
          for (uint32_t e = 0; e < kWidth; ++e) total[c][e] = __fadd_rn(total[c][e], 0.0f);
        }
      }
      if (at == span.begin + lane && !await(ex, mine, words + token * ex.parts + number, step, lane, kBack)) return;
#pragma unroll 1
      for (uint32_t far = 1; far < ex.ranks; ++far) {
        const uint32_t rank = (ex.rank + far) % ex.ranks;
        if (!(reached >> rank & 1)) continue;
        const uint64_t place =
            is_proxied(ex, rank) ? go.places[static_cast<uint64_t>(rank) * ex.max_tokens + token] : token;
        const char* const from = in<char>(ex, rank, step, ex.back) + place * ex.back_row_bytes;
        uint4 bits[kColumns];
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c)
          bits[c] = at + c * 32 < span.end ? __ldcg(reinterpret_cast<const uint4*>(from) + at + c * 32) : uint4{};
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c) {
          float values[kWidth];
          Vector<T>::open(bits[c], values);
#pragma unroll
          for (uint32_t e = 0; e < kWidth; ++e) total[c][e] = __fadd_rn(total[c][e], values[e]);
        }
      }
#pragma unroll
      for (uint32_t c = 0; c < kColumns; ++c)
        if (at + c * 32 < span.end) __stcs(y + at + c * 32, Vector<T>::close(total[c]));
    }
  }
}

// `kLate`: the weights are given now.
template <typename T, bool kLate>
__device__ inline void combine(const Exchange& ex, const Combine& go, char* shared) {
  __shared__ uint32_t steps[2];
  __shared__ bool broken;
  if (threadIdx.x == 0) {
    broken = is_broken(ex);  // one answer for the whole block
    steps[0] = step_now(ex, kCombineSend);
    steps[1] = step_now(ex, kCombineReceive);
  }
  const uint32_t warp = threadIdx.x / 32, lane = lane_of(), number = warp % kBackWarps;
  const uint32_t first = number * gridDim.x + blockIdx.x, stride = kBackWarps * gridDim.x;
  const Ahead ahead = look_ahead(ex, go, warp < kBackWarps, first);
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) {
    if (go.roles & kSend) pass_step(ex, kCombineSend, steps[0]);
    if (go.roles & kReceive) pass_step(ex, kCombineReceive, steps[1]);
  }
  if (broken) return;
  const bool other = lane < ex.ranks && ex.present >> lane & 1 && lane != ex.rank && !is_proxied(ex, lane);
  if (warp < kBackWarps) {
    if (!(go.roles & kSend)) return;
    // To everybody, also to those whom nothing goes back to: this rank has read all it was sent in this step (MOE-1). What a proxy
    // carries back holds the same.
    if (blockIdx.x == 0 && warp == 0 && other) store_release(out<uint32_t>(ex, lane, steps[0], ex.head_word), steps[0]);
    if (kLate && go.waited != nullptr && blockIdx.x == 0 && warp == 0 &&
        !time_weights(ex, go, steps[0], ahead.counts, other))
      return;
    send_sums<T, kLate>(ex, go, steps[0], first, stride, ahead, shared + warp * kRing * kBlockBytes);
    return;
  }
  if (kLate && go.roles & kSend) send_weights(ex, go, steps[0], __shfl_sync(kAll, ahead.counts, ex.rank));
  if (go.roles & kReceive) {
    take_sums<T, kLate>(ex, go, steps[1], first, stride, ahead);
    if (blockIdx.x == 0 && number == 0)
      await(ex, other, other ? in<uint32_t>(ex, lane, steps[1], ex.head_word) : nullptr, steps[1], lane, kHead);
  }
}

}  // namespace moe

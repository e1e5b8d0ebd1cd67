// stripes.h: the loops over stripes of XXH3, a part of loops.h, whose rules it keeps.
// A stripe adds to the sums what does not depend on them, and only the end of a block of 16 turns them round. So several threads can
// add up blocks, each on its own, and one of them chains what they found.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "rows/xxh3.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncfabric::rows {
namespace {

// What a loop over stripes does with each besides adding it up.
struct OnlySum {
  const uint8_t* next;
  void operator()(size_t at, const void*) const { __builtin_prefetch(next + at); }
};
template <bool kPast>
struct AndCopy {
  uint8_t* target;
  const uint8_t* next;
  void operator()(size_t at, const void* stripe) const {
    __builtin_prefetch(next + at);
#if defined(__AVX512F__)
    if (kPast) return _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), _mm512_loadu_si512(stripe));
#elif defined(__AVX2__)
    if (kPast) {
      const auto* from = static_cast<const __m256i*>(stripe);
      auto* to = reinterpret_cast<__m256i*>(target + at);
      _mm256_stream_si256(to, _mm256_loadu_si256(from));
      return _mm256_stream_si256(to + 1, _mm256_loadu_si256(from + 1));
    }
#endif
    std::memcpy(target + at, stripe, xxh3::kStripe);
  }
};

// Eight numbers: a stripe, or the sums. `add` puts a stripe to the sums, by its part of the secret; `put` sums to sums.
#if defined(__AVX512F__)

class Eight {
 public:
  void load(const void* from) { std::memcpy(&all_, from, sizeof all_); }
  void store(void* to) const { std::memcpy(to, &all_, sizeof all_); }
  void clear() { all_ = Longs{}; }
  void put(const Eight& sums) { all_ += sums.all_; }
  void add(const Eight& words, const uint8_t* secret) {
    Longs key, product;
    std::memcpy(&key, secret, sizeof key);
    key ^= words.all_;
    multiply_halves(key, key >> 32, product);
    all_ += product + __builtin_shufflevector(words.all_, words.all_, 1, 0, 3, 2, 5, 4, 7, 6);
  }
  void scramble() {
    Longs key, product;
    std::memcpy(&key, xxh3::kSecret + xxh3::kScrambleAt, sizeof key);
    all_ ^= all_ >> 47;
    all_ ^= key;
    const Longs prime = Longs{} + xxh3::kPrime32[0];
    multiply_halves(all_ >> 32, prime, key);
    multiply_halves(all_, prime, product);
    all_ = product + (key << 32);
  }

 private:
  using Longs = uint64_t __attribute__((vector_size(64)));

  // By the form that leaves no lane open: gcc 12 warns about its own header otherwise.
  [[gnu::always_inline]] static void multiply_halves(const Longs& a, const Longs& b, Longs& out) {
    out = reinterpret_cast<Longs>(
        _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
  }

  Longs all_;
};

#elif defined(__AVX2__)

class Eight {
 public:
  void load(const void* from) {
    for (size_t half = 0; half < 2; ++half) all_[half] = word(from, 32 * half);
  }
  void store(void* to) const {
    for (size_t half = 0; half < 2; ++half) _mm256_storeu_si256(static_cast<__m256i*>(to) + half, all_[half]);
  }
  void clear() { all_[0] = all_[1] = _mm256_setzero_si256(); }
  void put(const Eight& sums) {
    for (size_t half = 0; half < 2; ++half) all_[half] = _mm256_add_epi64(all_[half], sums.all_[half]);
  }
  void add(const Eight& words, const uint8_t* secret) {
    for (size_t half = 0; half < 2; ++half) {
      const __m256i keys = _mm256_xor_si256(words.all_[half], word(secret, 32 * half));
      all_[half] = _mm256_add_epi64(all_[half], _mm256_shuffle_epi32(words.all_[half], 0x4e));
      all_[half] = _mm256_add_epi64(all_[half], _mm256_mul_epu32(keys, _mm256_srli_epi64(keys, 32)));
    }
  }
  void scramble() {
    const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(xxh3::kPrime32[0]));
    for (size_t half = 0; half < 2; ++half) {
      __m256i mixed = _mm256_xor_si256(all_[half], _mm256_srli_epi64(all_[half], 47));
      mixed = _mm256_xor_si256(mixed, word(xxh3::kSecret + xxh3::kScrambleAt, 32 * half));
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
      all_[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
  }

 private:
  static __m256i word(const void* from, size_t at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint8_t*>(from) + at));
  }

  __m256i all_[2];
};

#else

class Eight {
 public:
  static_assert(std::endian::native == std::endian::little);

  void load(const void* from) { std::memcpy(all_, from, sizeof all_); }
  void store(void* to) const { std::memcpy(to, all_, sizeof all_); }
  void clear() { std::memset(all_, 0, sizeof all_); }
  void put(const Eight& sums) {
    for (size_t lane = 0; lane < 8; ++lane) all_[lane] += sums.all_[lane];
  }
  void add(const Eight& words, const uint8_t* secret) {
    for (size_t lane = 0; lane < 8; ++lane) {
      const uint64_t word = words.all_[lane], key = word ^ xxh3::word_at(secret + 8 * lane);
      all_[lane ^ 1] += word;
      all_[lane] += (key & 0xffffffff) * (key >> 32);
    }
  }
  void scramble() {
    for (size_t lane = 0; lane < 8; ++lane)
      all_[lane] = (all_[lane] ^ all_[lane] >> 47 ^ xxh3::word_at(xxh3::kSecret + xxh3::kScrambleAt + 8 * lane)) *
                   xxh3::kPrime32[0];
  }

 private:
  uint64_t all_[8];
};

#endif

// `kParts`: not one chain of sums but those of each block from nothing, one behind the other; a block that has begun goes on.
template <bool kParts, class Also>
void each_stripe(uint64_t* sums, const uint8_t* data, size_t count, size_t first, Also also) {
  using namespace xxh3;
  Eight lanes, words;
  if (kParts && first == 0)
    lanes.clear();
  else
    lanes.load(sums);
  for (size_t at = 0; at < count * kStripe; at += kStripe) {
    words.load(data + at);
    also(at, &words);
    lanes.add(words, kSecret + 8 * first);
    if (++first < kStripesOfBlock) continue;
    first = 0;
    if constexpr (kParts) {
      lanes.store(sums);
      lanes.clear();
      sums += 8;
    } else {
      lanes.scramble();
    }
  }
  if (!kParts || first != 0) lanes.store(sums);
}

void stripes(uint64_t* sums, const uint8_t* data, size_t count, size_t first, const uint8_t* next) {
  each_stripe<false>(sums, data, count, first, OnlySum{next});
}

template <bool kParts>
void copy_stripes(uint64_t* sums, const uint8_t* data, size_t count, size_t first, uint8_t* target, const uint8_t* next,
                  bool past) {
  if (past)
    each_stripe<kParts>(sums, data, count, first, AndCopy<true>{target, next});
  else
    each_stripe<kParts>(sums, data, count, first, AndCopy<false>{target, next});
}

void chain(uint64_t* sums, const uint64_t* parts, size_t blocks) {
  Eight lanes, part;
  lanes.load(sums);
  for (; blocks > 0; --blocks, parts += 8) {
    part.load(parts);
    lanes.put(part);
    lanes.scramble();
  }
  lanes.store(sums);
}

}  // namespace
}  // namespace asyncfabric::rows

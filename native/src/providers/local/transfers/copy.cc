// copy.cc: see copy.h. The widest stores are chosen at run time; the file builds for plain x86-64.
#include "providers/local/transfers/copy.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace asyncfabric::local {
namespace {

// Measured on Zen 5 (two cores): from 2 KiB on streaming wins; below, it evicts the line that the receiver is about to
// read.
constexpr size_t kStreamFrom = 2048;
constexpr size_t kBlock = 256;  // what one turn of a streaming loop moves

#if defined(__x86_64__)

// Each: `target` is aligned to 64, `source` is not, `blocks` of kBlock bytes.
[[gnu::target("avx512f")]] void stream_512(uint8_t* target, const uint8_t* source, size_t blocks) {
  for (; blocks > 0; --blocks, target += kBlock, source += kBlock) {
    const __m512i a = _mm512_loadu_si512(source);
    const __m512i b = _mm512_loadu_si512(source + 64);
    const __m512i c = _mm512_loadu_si512(source + 128);
    const __m512i d = _mm512_loadu_si512(source + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + 192), d);
  }
}

[[gnu::target("avx")]] void stream_256(uint8_t* target, const uint8_t* source, size_t blocks) {
  for (size_t lines = blocks * 2; lines > 0; --lines, target += 128, source += 128) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 96));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 96), d);
  }
}

void stream_128(uint8_t* target, const uint8_t* source, size_t blocks) {
  for (size_t lines = blocks * 4; lines > 0; --lines, target += 64, source += 64) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 16));
    const __m128i c = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 32));
    const __m128i d = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 48));
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), a);
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + 16), b);
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + 32), c);
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + 48), d);
  }
}

#endif

}  // namespace

Copier::Copier(CopyMode mode) {
#if defined(__x86_64__)
  if (mode == CopyMode::kPlain) return;
  if (__builtin_cpu_supports("avx512f")) {
    stream_ = stream_512;
    name_ = "streaming avx512";
  } else if (__builtin_cpu_supports("avx")) {
    stream_ = stream_256;
    name_ = "streaming avx";
  } else {
    stream_ = stream_128;
    name_ = "streaming sse2";
  }
  threshold_ = mode == CopyMode::kStreaming ? kBlock : kStreamFrom;
#else
  static_cast<void>(mode);
#endif
}

void Copier::copy(void* target, const void* source, size_t length) const {
#if defined(__x86_64__)
  if (stream_ != nullptr && length >= threshold_) {
    auto* to = static_cast<uint8_t*>(target);
    const auto* from = static_cast<const uint8_t*>(source);
    const size_t head = std::min<size_t>((64 - reinterpret_cast<uintptr_t>(to) % 64) % 64, length);
    const size_t blocks = (length - head) / kBlock;
    const size_t body = blocks * kBlock;
    std::memcpy(to, from, head);
    stream_(to + head, from + head, blocks);
    std::memcpy(to + head + body, from + head + body, length - head - body);
    _mm_sfence();  // streaming stores are weakly ordered: a later release store would not wait for them
    return;
  }
#endif
  if (length > 0) std::memcpy(target, source, length);
}

}  // namespace asyncfabric::local

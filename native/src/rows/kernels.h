// kernels.h: the inner loops, compiled once for each instruction set; `best_kernels` picks what this machine has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace asyncfabric::rows {

// Sums are over `width` elements, a multiple of 16. `weights` may be null: then the sources are added as they are.
struct Kernels {
  using Sum = void (*)(uint8_t* target, const uint8_t* const* sources, const float* weights, size_t count,
                       size_t width);
  using Carry = void (*)(float* sums, const uint8_t* const* sources, size_t count, size_t width);
  const char* name;
  Sum sum[3];      // by RowKind
  Carry carry[3];  // by RowKind
  // Copies without reading the target's cache lines first. `target` is aligned to 64, `length` a multiple of 64.
  void (*stream)(uint8_t* target, const uint8_t* source, size_t length);
  // Adds stripes of 64 bytes to the eight sums of XXH3; `first` of 16 is which one of its block the first of them is. Asks meanwhile
  // for as many bytes from `next`, which come after these: some processors see little ahead, and none where the next run begins.
  void (*stripes)(uint64_t* sums, const uint8_t* data, size_t count, size_t first, const uint8_t* next);
  // The same, and copies them to `target`. `past`: past the caches, to a target that is aligned to 64.
  void (*copy_stripes)(uint64_t* sums, const uint8_t* data, size_t count, size_t first, uint8_t* target,
                       const uint8_t* next, bool past);
  // The same again, but `sums` are eight for each block that the stripes touch, from nothing; a block that has begun goes on.
  void (*copy_parts)(uint64_t* sums, const uint8_t* data, size_t count, size_t first, uint8_t* target,
                     const uint8_t* next, bool past);
  // Makes of the sums of whole blocks, one behind the other, what `stripes` makes of the blocks.
  void (*chain)(uint64_t* sums, const uint64_t* parts, size_t blocks);
  // The sum of products behind the checksum `words`, over words of 32 bits of which the first is at `place`.
  uint64_t (*sum_words)(const uint8_t* words, size_t count, uint32_t place);
  // The rest takes any `width`. By kinds from and to; null where they are the same.
  using Convert = void (*)(uint8_t* target, const uint8_t* source, size_t width);
  Convert cast[3][3];
  // Each element over the scale, as float8_e4m3fn: to nearest, even; at most 448; what is no number stays none. By kind.
  void (*quantise[3])(uint8_t* target, const uint8_t* source, float scale, size_t width);
  // Raises the bits of sixteen fp32 to those of the largest absolute values; what is no number is larger than all. By kind.
  void (*largest[3])(uint32_t* most, const uint8_t* source, size_t width);
  // Writes the columns of a tile as rows that are `stride` bytes apart. The tile has rows of `pitch` bytes, a multiple of 16, and ends where a
  // multiple of 16 of them does. `past`: past the caches, where that is possible. By the bytes of an element: 1, 2, 4.
  void (*turn[3])(uint8_t* target, ptrdiff_t stride, const uint8_t* tile, size_t pitch, size_t rows, size_t columns,
                  bool past);
};

extern const Kernels kPlainKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

const Kernels& best_kernels();

}  // namespace asyncfabric::rows

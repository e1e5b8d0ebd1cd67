// kernels.cu: weights on their way, in the memory of one GPU: checksums of stretches, maxima of blocks, float8 by blocks.
// Nothing waits but for its own block. `make ptx` turns this file into the text that the package
// carries (asyncfabric/weights/memory/gpu/_generated/kernels.ptx); kernels.py above that has the structs in Python.
#include "elements.cuh"
#include "lay.cuh"
#include "whole.cuh"

namespace weights {

// Bytes in order: runs of `run_words` words; the outer dimensions that lead from run to run, innermost first.
struct Stretch {
  uint64_t address;
  uint64_t words;
  uint64_t place;  // of the first word in its checksum
  uint64_t stride[4];
  uint32_t size[4];
  uint32_t run_words;
  uint32_t sum;     // which checksum
  uint32_t tail;    // bytes behind the last whole word; of contiguous stretches only
  uint32_t vector;  // 1: all runs begin at multiples of 16 and have multiples of 4 words
};

// As many as fit the parameters of a launch: nothing has to be brought to the GPU before.
struct Stretches {
  Stretch each[40];
};

struct Matrices {
  uint64_t source;
  uint64_t lead_stride;  // elements
  uint64_t row_stride;
  uint64_t scales;  // or where maxima go
  uint64_t out;
  uint32_t leads;
  uint32_t rows;
  uint32_t columns;
  uint32_t row;  // of the first element within its block
  uint32_t column;
  uint32_t block_rows;
  uint32_t block_columns;
  uint32_t vector;  // 1: eight neighbours may be loaded at once and share a block
};

// Of the threads of a warp one reports what all have found.
AF_DEVICE bool speaks() {
#if defined(__CUDACC__)
  return threadIdx.x % 32 == 0;
#else
  return true;
#endif
}

template <typename Value, typename Join>
AF_DEVICE Value joined(Value value, Join join) {
#if defined(__CUDACC__)
  for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
#endif
  return value;
}

AF_DEVICE uint64_t offset_of(const Stretch& stretch, uint32_t word) {
  uint32_t run = word / stretch.run_words;
  uint64_t offset = static_cast<uint64_t>(word - run * stretch.run_words) * 4;
#pragma unroll
  for (int dim = 0; dim < 4 && run != 0; ++dim) {
    const uint32_t next = run / stretch.size[dim];
    offset += (run - next * stretch.size[dim]) * stretch.stride[dim];
    run = next;
  }
  return offset;
}

template <bool kVector>
AF_DEVICE uint64_t product_of(const Stretch& stretch, uint32_t word, const uint4& words) {
  const uint32_t place = static_cast<uint32_t>(stretch.place) + word;
  if (!kVector) return product(words.x, place);
  return product(words.x, place) + product(words.y, place + 1) + product(words.z, place + 2) +
         product(words.w, place + 3);
}

template <bool kVector>
AF_DEVICE uint4 loaded(const Stretch& stretch, uint32_t word, bool whole) {
  const uint64_t at = stretch.address + (whole ? static_cast<uint64_t>(word) * 4 : offset_of(stretch, word));
  if (kVector) return *reinterpret_cast<const uint4*>(at);
  return uint4{*reinterpret_cast<const uint32_t*>(at), 0, 0, 0};
}

// Four loads are under way before the first is used.
template <bool kVector>
AF_DEVICE uint64_t sum_of(const Stretch& stretch, uint32_t first, uint32_t threads) {
  constexpr uint32_t kWords = kVector ? 4 : 1;
  const bool whole = stretch.run_words >= stretch.words;
  const uint64_t step = static_cast<uint64_t>(threads) * kWords;
  uint64_t total = 0;
  uint64_t word = static_cast<uint64_t>(first) * kWords;
  for (; word + 3 * step < stretch.words; word += 4 * step) {
    uint4 four[4];
#pragma unroll
    for (int index = 0; index < 4; ++index) {
      four[index] = loaded<kVector>(stretch, static_cast<uint32_t>(word + index * step), whole);
    }
#pragma unroll
    for (int index = 0; index < 4; ++index) {
      total += product_of<kVector>(stretch, static_cast<uint32_t>(word + index * step), four[index]);
    }
  }
  for (; word < stretch.words; word += step) {
    const uint32_t here = static_cast<uint32_t>(word);
    total += product_of<kVector>(stretch, here, loaded<kVector>(stretch, here, whole));
  }
  return total;
}

template <typename Form>
AF_DEVICE void maxima_of(const Matrices& box) {
  using Bits = typename Form::Bits;
  const uint32_t tiles = box.block_rows * box.block_columns * box.leads;
  for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const uint32_t tile_column = tile % box.block_columns;
    const uint32_t tile_row = tile / box.block_columns % box.block_rows;
    const uint32_t lead = tile / box.block_columns / box.block_rows;
    const uint32_t top = tile_row == 0 ? 0 : tile_row * kBlock - box.row;
    const uint32_t left = tile_column == 0 ? 0 : tile_column * kBlock - box.column;
    uint32_t bottom = (tile_row + 1) * kBlock - box.row;
    uint32_t right = (tile_column + 1) * kBlock - box.column;
    if (bottom > box.rows) bottom = box.rows;
    if (right > box.columns) right = box.columns;
    const Bits* source = reinterpret_cast<const Bits*>(box.source) + lead * box.lead_stride;
    uint32_t most = 0;
    if (box.vector != 0) {
      constexpr uint32_t kEach = 16 / sizeof(Bits);
      constexpr uint32_t kAcross = kBlock / kEach;
      const uint32_t column = left + threadIdx.x % kAcross * kEach;
      if (column < right) {
        for (uint32_t row = top + threadIdx.x / kAcross; row < bottom; row += blockDim.x / kAcross) {
          const uint4 loaded = *reinterpret_cast<const uint4*>(source + row * box.row_stride + column);
          const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
          for (int index = 0; index < 4; ++index) {
            uint32_t size = words[index] & ~Form::kSign;
            if (sizeof(Bits) == 2) {
              const uint32_t high = words[index] >> 16 & ~Form::kSign;
              size &= 0xFFFFu;
              size = size > high ? size : high;
            }
            most = most > size ? most : size;
          }
        }
      }
    } else {
      for (uint32_t row = top + threadIdx.x / kBlock; row < bottom; row += blockDim.x / kBlock) {
        const uint32_t column = left + threadIdx.x % kBlock;
        if (column < right) {
          const uint32_t size = source[row * box.row_stride + column] & ~Form::kSign;
          most = most > size ? most : size;
        }
      }
    }
    most = joined(most, [](uint32_t one, uint32_t other) { return one > other ? one : other; });
    if (speaks()) atomicMax(reinterpret_cast<uint32_t*>(box.out) + tile, most);
  }
}

template <typename Form>
AF_DEVICE void quantise(const Matrices& box) {
  using Bits = typename Form::Bits;
  const uint32_t each = box.vector != 0 ? 8 : 1;
  const uint32_t across = (box.columns + each - 1) / each;
  const uint64_t count = static_cast<uint64_t>(box.leads) * box.rows * across;
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  for (uint64_t index = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < count; index += threads) {
    const uint64_t line = index / across;  // lead and row
    const uint32_t column = static_cast<uint32_t>(index - line * across) * each;
    const uint32_t lead = static_cast<uint32_t>(line / box.rows);
    const uint32_t row = static_cast<uint32_t>(line - static_cast<uint64_t>(lead) * box.rows);
    const float* scales = reinterpret_cast<const float*>(box.scales) +
                          (static_cast<uint64_t>(lead) * box.block_rows + (row + box.row) / kBlock) * box.block_columns;
    const float scale = scales[(column + box.column) / kBlock];
    const Bits* source =
        reinterpret_cast<const Bits*>(box.source) + lead * box.lead_stride + row * box.row_stride + column;
    uint8_t* out = reinterpret_cast<uint8_t*>(box.out) + line * box.columns + column;
    if (box.vector != 0) {
      Bits values[8];
      const uint4* from = reinterpret_cast<const uint4*>(source);
#pragma unroll
      for (uint32_t part = 0; part < sizeof(values) / sizeof(uint4); ++part) {
        const uint4 loaded = from[part];
        memcpy(reinterpret_cast<char*>(values) + part * sizeof(uint4), &loaded, sizeof(uint4));
      }
      uint32_t words[2] = {0, 0};
#pragma unroll
      for (int number = 0; number < 8; ++number) {
        words[number / 4] |= quantised(Form::value(values[number]), scale) << (number % 4 * 8);
      }
      *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
    } else {
      *out = static_cast<uint8_t>(quantised(Form::value(*source), scale));
    }
  }
}

#if defined(__CUDACC__)
template <typename Form>
__device__ __forceinline__ void whole_blocks(const Wholes& boxes, uint32_t count) {
  __shared__ uint32_t found[kThreads / 32];
  __shared__ alignas(16) uint8_t turned[kBlock * kPitch];
  const Whole box = boxes.each[box_of(boxes, count, blockIdx.x)];
  const Spot spot = spot_of(box, blockIdx.x);
  Held<Form> held;
  uint32_t most = look<Form>(box, spot, threadIdx.x, held);
  most = joined(most, [](uint32_t one, uint32_t other) { return one > other ? one : other; });
  if (speaks()) found[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (uint32_t warp = 0; warp < kThreads / 32; ++warp) most = most > found[warp] ? most : found[warp];
  if (box.out_strides[2] == 1) {
    write<Form>(box, spot, threadIdx.x, held, most, nullptr);
    return;
  }
  write<Form>(box, spot, threadIdx.x, held, most, turned);
  __syncthreads();
  turn(box, spot, threadIdx.x, turned);
}

template <typename From, typename To>
__device__ __forceinline__ void lay(const Wholes& boxes, uint32_t count) {
  __shared__ typename To::Bits turned[kSide * kTilePitch];
  const Whole box = boxes.each[box_of(boxes, count, blockIdx.x)];
  const Spot spot = spot_of(box, blockIdx.x);
  if (box.out_strides[2] == sizeof(typename To::Bits)) {
    bring<From, To>(box, spot, threadIdx.x, nullptr);
    return;
  }
  bring<From, To>(box, spot, threadIdx.x, turned);
  __syncthreads();
  turn_tile(box, spot, threadIdx.x, turned);
}
#endif

}  // namespace weights

extern "C" {

// A row of blocks for each stretch; `totals` begins as zeros.
__global__ void __launch_bounds__(256) weights_sums(const weights::Stretches stretches, unsigned long long* totals) {
  const weights::Stretch stretch = stretches.each[blockIdx.y];
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t step = gridDim.x * blockDim.x;
  uint64_t total =
      stretch.vector != 0 ? weights::sum_of<true>(stretch, first, step) : weights::sum_of<false>(stretch, first, step);
  if (first == 0 && stretch.tail != 0) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(stretch.address + stretch.words * 4);
    uint32_t word = 0;
    for (uint32_t index = 0; index < stretch.tail; ++index) word |= static_cast<uint32_t>(bytes[index]) << (8 * index);
    total += weights::product(word, static_cast<uint32_t>(stretch.place + stretch.words));
  }
  total = weights::joined(total, [](uint64_t one, uint64_t other) { return one + other; });
#if defined(__CUDACC__)
  __shared__ unsigned long long found[8];
  if (weights::speaks()) found[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < 8; ++warp) total += found[warp];
#endif
  if (total != 0) atomicAdd(totals + stretch.sum, static_cast<unsigned long long>(total));
}

// Brings sums to memory of the host, and leaves zeros. No copy engine is asked: those are busy with weights.
__global__ void __launch_bounds__(256)
    weights_bring(unsigned long long* totals, unsigned long long* out, uint32_t count) {
  const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  out[at] = totals[at];
  totals[at] = 0;
}

// What is left of the bits without their signs; the place for it begins as zeros.
__global__ void __launch_bounds__(256) weights_maxima_bfloat16(weights::Matrices box) {
  weights::maxima_of<weights::Bfloat16>(box);
}
__global__ void __launch_bounds__(256) weights_maxima_float16(weights::Matrices box) {
  weights::maxima_of<weights::Float16>(box);
}
__global__ void __launch_bounds__(256) weights_maxima_float32(weights::Matrices box) {
  weights::maxima_of<weights::Float32>(box);
}

__global__ void __launch_bounds__(256) weights_quantise_bfloat16(weights::Matrices box) {
  weights::quantise<weights::Bfloat16>(box);
}
__global__ void __launch_bounds__(256) weights_quantise_float16(weights::Matrices box) {
  weights::quantise<weights::Float16>(box);
}
__global__ void __launch_bounds__(256) weights_quantise_float32(weights::Matrices box) {
  weights::quantise<weights::Float32>(box);
}

#if defined(__CUDACC__)
// A block for each quantisation block of all boxes; registers for so many blocks at once that loads cover the memory's latency.
__global__ void __launch_bounds__(256, 4) weights_whole_bfloat16(const weights::Wholes boxes, uint32_t count) {
  weights::whole_blocks<weights::Bfloat16>(boxes, count);
}
__global__ void __launch_bounds__(256, 4) weights_whole_float16(const weights::Wholes boxes, uint32_t count) {
  weights::whole_blocks<weights::Float16>(boxes, count);
}
__global__ void __launch_bounds__(256, 2) weights_whole_float32(const weights::Wholes boxes, uint32_t count) {
  weights::whole_blocks<weights::Float32>(boxes, count);
}

// A block for each tile of all boxes.
#define AF_LAY(name, from, to)                                                                             \
  __global__ void __launch_bounds__(256) weights_lay_##name(const weights::Wholes boxes, uint32_t count) { \
    weights::lay<weights::from, weights::to>(boxes, count);                                                \
  }
AF_LAY(16, Bits16, Bits16)
AF_LAY(32, Bits32, Bits32)
AF_LAY(bfloat16_float16, Bfloat16, Float16)
AF_LAY(bfloat16_float32, Bfloat16, Float32)
AF_LAY(float16_bfloat16, Float16, Bfloat16)
AF_LAY(float16_float32, Float16, Float32)
AF_LAY(float32_bfloat16, Float32, Bfloat16)
AF_LAY(float32_float16, Float32, Float16)
#endif

}  // extern "C"

// kernels_on_processor.cc: the kernels of weights as functions of a processor, thread after thread: what waits for its block is in
// steps, between which all threads are through with the one before. test_weight_kernels.py compiles this and compares what they write with numpy.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __global__
#define __launch_bounds__(threads)

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct Place {
  uint32_t x, y;
};

static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static void atomicMax(uint32_t* place, uint32_t value) { *place = value > *place ? value : *place; }
static void atomicAdd(unsigned long long* place, unsigned long long value) { *place += value; }

static thread_local Place blockIdx, threadIdx, blockDim, gridDim;

#include "../../native/cuda/weights/kernels.cu"

template <typename Kernel>
static void launch(uint32_t wide, uint32_t high, Kernel kernel) {
  gridDim = {wide, high};
  blockDim = {256, 1};
  for (blockIdx.y = 0; blockIdx.y < high; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < wide; ++blockIdx.x) {
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel();
    }
  }
}

extern "C" void run_sums(const weights::Stretches* reported, unsigned long long* totals, uint32_t wide, uint32_t high) {
  launch(wide, high, [&] { weights_sums(*reported, totals); });
}

extern "C" void run_bring(unsigned long long* totals, unsigned long long* out, uint32_t count, uint32_t wide) {
  launch(wide, 1, [&] { weights_bring(totals, out, count); });
}

#define RUN(name)                                                           \
  extern "C" void run_##name(const weights::Matrices* box, uint32_t wide) { \
    launch(wide, 1, [&] { weights_##name(*box); });                         \
  }
RUN(maxima_bfloat16)
RUN(maxima_float16)
RUN(maxima_float32)
RUN(quantise_bfloat16)
RUN(quantise_float16)
RUN(quantise_float32)

template <typename Form>
static void whole(const weights::Wholes* reported, uint32_t count, uint32_t tiles) {
  std::vector<weights::Held<Form>> held(weights::kThreads);
  std::vector<uint8_t> turned(weights::kBlock * weights::kPitch);
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    const weights::Whole& box = reported->each[weights::box_of(*reported, count, tile)];
    const weights::Spot spot = weights::spot_of(box, tile);
    const bool turns = box.out_strides[2] != 1;
    uint32_t most = 0;
    for (uint32_t one = 0; one < weights::kThreads; ++one) {
      most = std::max(most, weights::look<Form>(box, spot, one, held[one]));
    }
    for (uint32_t one = 0; one < weights::kThreads; ++one) {
      weights::write<Form>(box, spot, one, held[one], most, turns ? turned.data() : nullptr);
    }
    for (uint32_t one = 0; turns && one < weights::kThreads; ++one) weights::turn(box, spot, one, turned.data());
  }
}

#define RUN_WHOLE(name, form)                                                                     \
  extern "C" void run_whole_##name(const weights::Wholes* reported, uint32_t count, uint32_t tiles) { \
    whole<weights::form>(reported, count, tiles);                                                     \
  }
RUN_WHOLE(bfloat16, Bfloat16)
RUN_WHOLE(float16, Float16)
RUN_WHOLE(float32, Float32)

template <typename From, typename To>
static void lay(const weights::Wholes* reported, uint32_t count, uint32_t tiles) {
  using Bits = typename To::Bits;
  std::vector<Bits> turned(weights::kSide * weights::kTilePitch);
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    const weights::Whole& box = reported->each[weights::box_of(*reported, count, tile)];
    const weights::Spot spot = weights::spot_of(box, tile);
    Bits* turns = box.out_strides[2] != sizeof(Bits) ? turned.data() : nullptr;
    for (uint32_t one = 0; one < weights::kThreads; ++one) weights::bring<From, To>(box, spot, one, turns);
    for (uint32_t one = 0; turns && one < weights::kThreads; ++one) weights::turn_tile<Bits>(box, spot, one, turns);
  }
}

#define RUN_LAY(name, from, to)                                                                 \
  extern "C" void run_lay_##name(const weights::Wholes* reported, uint32_t count, uint32_t tiles) { \
    lay<weights::from, weights::to>(reported, count, tiles);                                        \
  }
RUN_LAY(16, Bits16, Bits16)
RUN_LAY(32, Bits32, Bits32)
RUN_LAY(bfloat16_float16, Bfloat16, Float16)
RUN_LAY(bfloat16_float32, Bfloat16, Float32)
RUN_LAY(float16_bfloat16, Float16, Bfloat16)
RUN_LAY(float16_float32, Float16, Float32)
RUN_LAY(float32_bfloat16, Float32, Bfloat16)
RUN_LAY(float32_float16, Float32, Float16)

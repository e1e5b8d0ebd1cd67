// kernels.cu: dispatch and combine among GPUs, as one launch each; as two with a gate in between where ranks are on other hosts.
// `make ptx` turns this file into asyncfabric/moe/gpu/_generated/kernels.ptx, which is what the package carries: no CUDA compiler is needed
// to install it. How a step goes, and what keeps ranks from writing to what was not read: docs/explain/moe_gpu.md.
#include "combine.cuh"
#include "dispatch.cuh"
#include "gate.cuh"
#include "nodes.cuh"

extern "C" __global__ void __launch_bounds__(moe::kDispatchWarps * 32, 1)
    moe_dispatch(const __grid_constant__ moe::Exchange ex, const __grid_constant__ moe::Dispatch go) {
  extern __shared__ __align__(128) char shared[];
  moe::dispatch(ex, go, shared);
}

// `late`: weights are given to it, not to the dispatch.
#define MOE_COMBINE(name, type, late)                                                           \
  extern "C" __global__ void __launch_bounds__(moe::kCombineWarps * 32, 1)                      \
      name(const __grid_constant__ moe::Exchange ex, const __grid_constant__ moe::Combine go) { \
    extern __shared__ __align__(128) char shared[];                                             \
    moe::combine<type, late>(ex, go, shared);                                                   \
  }
MOE_COMBINE(moe_combine_bfloat16, __nv_bfloat16, false)
MOE_COMBINE(moe_combine_float16, __half, false)
MOE_COMBINE(moe_combine_float32, float, false)
MOE_COMBINE(moe_weigh_bfloat16, __nv_bfloat16, true)
MOE_COMBINE(moe_weigh_float16, __half, true)
MOE_COMBINE(moe_weigh_float32, float, true)

extern "C" __global__ void __launch_bounds__(32, 1)
    moe_gate(const __grid_constant__ moe::Exchange ex, const __grid_constant__ moe::Gate go) {
  moe::gate(ex, go);
}

extern "C" __global__ void moe_spread(const __grid_constant__ moe::NodeStep go) {
  moe::spread(go, blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, gridDim.x * (blockDim.x / 32));
}

extern "C" __global__ void moe_unpack(const __grid_constant__ moe::NodeStep go) {
  moe::unpack(go, blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, gridDim.x * (blockDim.x / 32));
}

extern "C" __global__ void moe_trace(const __grid_constant__ moe::NodeStep go) {
  moe::trace(go, blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, gridDim.x * (blockDim.x / 32));
}

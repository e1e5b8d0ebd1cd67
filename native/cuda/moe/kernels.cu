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

extern "C" __global__ void __launch_bounds__(moe::kCombineWarps * 32, 1)
    moe_combine_bfloat16(const __grid_constant__ moe::Exchange ex, const __grid_constant__ moe::Combine go) {
  extern __shared__ __align__(128) char shared[];
  moe::combine<__nv_bfloat16>(ex, go, shared);
}

extern "C" __global__ void __launch_bounds__(moe::kCombineWarps * 32, 1)
    moe_combine_float16(const __grid_constant__ moe::Exchange ex, const __grid_constant__ moe::Combine go) {
  extern __shared__ __align__(128) char shared[];
  moe::combine<__half>(ex, go, shared);
}

extern "C" __global__ void __launch_bounds__(moe::kCombineWarps * 32, 1)
    moe_combine_float32(const __grid_constant__ moe::Exchange ex, const __grid_constant__ moe::Combine go) {
  extern __shared__ __align__(128) char shared[];
  moe::combine<float>(ex, go, shared);
}

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

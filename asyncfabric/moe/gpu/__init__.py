"""asyncfabric.moe.gpu: the same exchange among GPUs, by kernels that store to each other's memory.

The public door; no logic. With `hosts=` ranks of other hosts take part, by a proxy over the fabric. How it works, and
its invariants: docs/explain/moe_gpu.md.

    async with open_moe_cuda(fabric, MoeGroup(rank, addresses), config, device="cuda:0") as moe:
        handle = moe.dispatch(x, indices, weights)      # both calls return at once: the stream does the rest
        y = moe.combine(run_experts(handle.rows, handle.offsets), handle)
"""

from asyncfabric.moe.gpu.exchange import CudaMoeExchange
from asyncfabric.moe.gpu.handle import CudaMoeHandle
from asyncfabric.moe.gpu.lanes import cuda_buffer_bytes
from asyncfabric.moe.gpu.opening import open_moe_cuda, open_moe_ranks, open_moe_slots
from asyncfabric.moe.gpu.ranks import CudaRankExchange
from asyncfabric.moe.gpu.slots import CudaSlotExchange

__all__ = [
    "CudaMoeExchange",
    "CudaMoeHandle",
    "CudaRankExchange",
    "CudaSlotExchange",
    "cuda_buffer_bytes",
    "open_moe_cuda",
    "open_moe_ranks",
    "open_moe_slots",
]

"""Opening an exchange among the GPUs of one host. Runs on the event loop's thread."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import torch

from asyncfabric import Fabric
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.group import MoeGroup
from asyncfabric.moe.nvlink.exchange import CudaMoeExchange
from asyncfabric.moe.nvlink.layout import NvlinkLayout, cuda_buffer_bytes

DEADLINE_S = 10.0


def open_moe_cuda(
    fabric: Fabric,
    group: MoeGroup,
    config: MoeConfig,
    *,
    device: torch.device | str,
    blocks: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> AbstractAsyncContextManager[CudaMoeExchange]:
    """Open an exchange among GPUs of one host, as `async with` does.

    Allocates all memory that it will need and maps that of the other ranks, which must reach each other by NVLink or be
    on one GPU.

    Args:
        fabric: of this rank, on any rail: ranks meet over its messages, nothing else of a step uses it.
        group: who takes part; 8 ranks at most.
        config: equal on all ranks. node_size must be 1, and private_tokens is not used: each token has a place.
        device: of this rank, "cuda:0" for example.
        blocks: of each launch, each on a multiprocessor of its own; None: as many as there are. All blocks of all ranks
            on one GPU must fit on it at once.
        deadline_s: how long a kernel waits for another rank, in seconds of the GPU's clock.

    Raises:
        ValueError: a config that the kernels cannot do, or buffers of more than config.buffer_limit_bytes.
        DeviceError: no memory left, or no GPU that can do it.
        MissingRankError: a rank is lost, or did not open before the caller's deadline.
        RemoteProtocolError: a rank opened with another configuration.

    Cancellation: what was opened is closed again, shielded; then it goes on.
    """
    if len(group.addresses) != config.ranks:
        raise ValueError(f"config.ranks is {config.ranks}, the group has {len(group.addresses)} addresses")
    layout, found = NvlinkLayout(config), torch.device(device)
    if found.type != "cuda" or found.index is None:
        raise ValueError(f"device must name a GPU, such as cuda:0, got {found}")
    if blocks is not None and blocks <= layout.routers:
        raise ValueError(f"blocks must be more than the {layout.routers} that route, got {blocks}")
    if not deadline_s > 0:
        raise ValueError(f"deadline_s must be more than 0, got {deadline_s}")
    needed = cuda_buffer_bytes(config)
    if needed > config.buffer_limit_bytes:
        raise ValueError(
            f"the exchange needs {needed} bytes on each GPU, config.buffer_limit_bytes is {config.buffer_limit_bytes};"
            " raise it, or lower max_tokens or in_flight"
        )
    return _opening(CudaMoeExchange(fabric, group, layout, found, blocks, deadline_s))


@asynccontextmanager
async def _opening(moe: CudaMoeExchange) -> AsyncIterator[CudaMoeExchange]:
    async with moe._stack:
        await moe._open()
        try:
            yield moe
        finally:
            moe._session = None

"""CudaRankExchange: an exchange among GPUs whose experts are its ranks: a token goes to each rank once at most.

What it adds is that promise, which the type of the routes keeps, and the smaller memory that it allows. Runs on the
thread that calls it, on the current stream, as CudaMoeExchange does.
"""

from __future__ import annotations

import torch

from asyncfabric.moe.gpu.exchange import CudaMoeExchange
from asyncfabric.moe.gpu.handle import CudaMoeHandle
from asyncfabric.moe.gpu.launch import AS_THEY_ARE
from asyncfabric.moe.gpu.tensors import checked_mask


def routes_of(in_rank: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the choices of tokens as kernels take them: choice r is rank r, or -1; no rank is named twice.

    Args:
        in_rank: shape [tokens, ranks], bool.
        numbers: of the ranks, then -1; int32, shape [ranks + 1], on the same device.
    """
    return torch.where(in_rank, numbers[:-1], numbers[-1]).contiguous()


def numbers_of(ranks: int, device: torch.device) -> torch.Tensor:
    """Return the numbers that `routes_of` takes."""
    return torch.tensor([*range(ranks), -1], dtype=torch.int32, device=device)


class CudaRankExchange(CudaMoeExchange):
    """An open exchange whose experts are its ranks; made by `async with open_moe_ranks(...)`.

    `dispatch` and `dispatch_send` take as `indices` which rank each token goes to, shape [tokens, ranks], bool: with
    numbers a token could name a rank twice, for which the rows have no room. Choice r of a token is of rank r, so that
    weights have the same shape. The tensor may be changed after the call.
    """

    async def _open(self) -> None:
        await super()._open()
        self._numbers = numbers_of(self.config.ranks, self.device)
        for tokens in (1, 2):  # now: beside a kernel that waits for another rank of this process no code is loaded
            routes_of(torch.zeros(tokens, self.config.ranks, dtype=torch.bool, device=self.device), self._numbers)
        torch.cuda.synchronize(self.device)  # steps may be on any stream

    def _begin(
        self,
        x: torch.Tensor,
        indices: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        count: torch.Tensor | None,
        cast: int = AS_THEY_ARE,
    ) -> CudaMoeHandle:
        self._opened()
        checked_mask(self.config, self.device, indices)
        return super()._begin(x, routes_of(indices, self._numbers), weights, scales, count, cast)

"""A measured process with a KvPool on a GPU."""

from __future__ import annotations

import torch

from asyncfabric import Region
from asyncfabric_services.bench.gpu.worker import GpuWorker
from asyncfabric_services.bench.kv.worker import KvWorker


class GpuKvWorker(KvWorker, GpuWorker):
    """One fabric with one rail, `cuda:N`, and one pool there."""

    @property
    def device(self) -> str:
        """Return the GPU of the rail."""
        return self._fabric.rails[0].device

    def foreign(self, length_bytes: int) -> object:
        """Return memory of torch on that GPU."""
        return torch.empty(length_bytes, dtype=torch.uint8, device=self.device)

    def take(self, region: Region) -> None:
        """Keep the memory of a pool as what calls fill and check."""
        self._tensor = region.tensor(torch.uint8)

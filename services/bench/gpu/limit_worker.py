"""A process without a fabric that copies as torch does: between the first and the last GPU, and with the host."""

from __future__ import annotations

import time

import torch

from asyncfabric_services.bench.worker import BenchWorker
from asyncfabric_services.exits import EnvironmentUnfit


class GpuLimitWorker(BenchWorker):
    """The bare copies of one run."""

    _ends: dict[str, tuple[torch.Tensor, torch.Tensor]]

    async def do_memory(self, length_bytes: int) -> str:
        """Make a tensor on the first and one on the last GPU, and page-locked ones; return the name of the GPU."""
        if not torch.cuda.is_available():
            raise EnvironmentUnfit("torch sees no GPU; see asyncfabric doctor --provider cuda")
        last = torch.cuda.device_count() - 1
        near = torch.empty(length_bytes, dtype=torch.uint8, device="cuda:0")
        far = torch.empty(length_bytes, dtype=torch.uint8, device=f"cuda:{last}")
        host = torch.empty(length_bytes, dtype=torch.uint8).pin_memory()
        self._ends = {"peer_copy": (near, far), "pinned_up": (host, far), "pinned_down": (near, host)}
        return f"{last + 1} x {torch.cuda.get_device_name(0)}"

    async def do_copy(self, limit: str, op_bytes: int, count: int, awaited: bool) -> float:
        """Copy the first bytes `count` times, all in flight or one awaited after the other; return seconds."""
        source, target = (tensor[:op_bytes] for tensor in self._ends[limit])
        started = time.perf_counter()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
            if awaited:
                torch.cuda.synchronize(0)
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

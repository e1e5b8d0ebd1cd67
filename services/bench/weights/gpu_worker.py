"""A measured process of an update among GPUs: weights in tensors of torch; torch's copies between GPUs are the limit.

Trainers are on the first GPUs, receivers on the last ones, where torch makes of whole matrices what every tensor is
compared with.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

import asyncfabric as af
from asyncfabric.weights.plan.formats import STORED_AS
from asyncfabric_services.bench.weights.gpu_reference import wrong_tensor
from asyncfabric_services.bench.weights.worker import WeightsWorker
from asyncfabric_services.bench.weights.workload import FORMS, mixed_rows

BITS = {2: torch.int16, 4: torch.int32}


class GpuWeightsWorker(WeightsWorker):
    """One participant, on the GPU of its rail."""

    _peer_copy: tuple[torch.Tensor, torch.Tensor]

    async def do_open(self, config: dict[str, Any]) -> dict[str, Any]:
        """Open the fabric; a rail "cuda:-N" is that of the Nth GPU from the last one."""
        if not torch.cuda.is_available():
            raise af.DeviceError("torch sees no GPU", remedy="install torch with CUDA; see asyncfabric doctor")
        (rail,) = config["rails"]
        count = torch.cuda.device_count()
        number = int(rail.removeprefix("cuda:")) % count
        self.device = f"cuda:{number}"
        self._far = f"cuda:{count - 1 - number}"
        return await super().do_open(config | {"rails": [self.device]})

    def _part(self, number: int, seed: int) -> torch.Tensor:
        return self._made(number, *self._rows, seed)

    def _made(self, number: int, begin: int, end: int, seed: int) -> torch.Tensor:
        side, form = self._model["side"], self._model["form"]
        stored = STORED_AS[FORMS[form][0]]
        found = torch.empty((end - begin, side), dtype=BITS[stored.itemsize], device=self.device)
        step = max(1, (1 << 24) // side)
        for low in range(begin, end, step):
            rows = mixed_rows(self._numbers, number, side, low, min(end, low + step), seed, form)
            found[low - begin : low - begin + step] = rows.view(-1, side).to(found.dtype)
        return found.view(getattr(torch, FORMS[form][0]))

    async def do_check(self, seed: int) -> str:
        """As a receiver: compare every tensor with what torch makes of whole matrices; "" is good."""
        side, replica = self._model["side"], self._replica
        whole = partial(self._made, begin=0, end=side, seed=seed)
        name = wrong_tensor(replica.tensors(), replica.receiver, self._model, whole)
        return f"{name} of {replica.name}/{replica.receiver} is wrong" if name else ""

    def _numbers(self, first: int, end: int) -> torch.Tensor:
        return torch.arange(first, end, dtype=torch.int64, device=self.device)

    async def do_prepare_copy(self, length_bytes: int) -> None:
        """As a trainer: memory here and on a GPU of the receivers."""
        self._peer_copy = (
            torch.ones(length_bytes, dtype=torch.uint8, device=self.device),
            torch.zeros(length_bytes, dtype=torch.uint8, device=self._far),
        )

    async def do_copy(self, limit: Any, op_bytes: int, count: int) -> float:
        """As a trainer: copy between the GPUs, all in flight, walking round; return seconds."""
        source, target = self._peer_copy
        slots = source.numel() // op_bytes
        for device in (self.device, self._far):
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        for number in range(count):
            at = number % slots * op_bytes
            target[at : at + op_bytes].copy_(source[at : at + op_bytes], non_blocking=True)
        for device in (self.device, self._far):
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

"""Weights on GPUs: fixtures of updates over cuda rails, whose trainers hold tensors; what the tests of them share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from weight_fixture import open_fixture

from asyncfabric.weights import Plan

WHERE = ["gpu to gpu", "gpu to host", "host to gpu"]
INTS = {1: np.uint8, 2: np.int16, 4: np.int32}


def tensor_of(array: Any, device: str) -> Any:
    """A tensor with these bits, of integers."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array).view(INTS[array.itemsize])).to(device)


class Tensors:
    """The trainers' arrays once more on a GPU, as tensors of the types that the plan names."""

    def __init__(self, plan: Plan) -> None:
        pairs = set(zip(plan.move_parameter.tolist(), plan.move_kind.tolist(), strict=True))
        self._types = {plan.parameters[name]: plan.kinds[kind].dtype for name, kind in pairs}
        self._held: list[tuple[Any, Any]] = []

    def given(self, rank: int, held: dict[str, Any]) -> dict[str, Any]:
        import torch

        found = {}
        for name, array in held.items():
            bits = tensor_of(array, "cuda:0")
            self._held.append((bits, array))
            found[name] = bits.view(getattr(torch, self._types[name]))
        return found

    def refresh(self) -> None:
        for bits, array in self._held:
            bits.copy_(tensor_of(array, "cpu"))


@asynccontextmanager
async def gpu_fixture(
    plan: Plan, shard: Any, log: Path, far: int, where: str = WHERE[0], **more: Any
) -> AsyncIterator[Any]:
    """A fixture over cuda rails, and what copies the trainers' arrays to their tensors again."""
    sender, receiver = where.split(" to ")
    tensors = Tensors(plan)
    async with open_fixture(
        plan,
        shard,
        log,
        rail=lambda name: f"cuda:{far}" if "/" in name else "cuda:0",
        given=tensors.given if sender == "gpu" else lambda rank, held: held,
        reads=lambda name: {"device": f"cuda:{far}" if receiver == "gpu" else "cpu"},
        **more,
    ) as fixture:
        yield fixture, tensors.refresh

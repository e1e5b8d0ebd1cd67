"""Shadows in host memory are page-locked while a receiver of a GPU is open. The test replaces the driver."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from asyncfabric._gpu import Driver
from asyncfabric.weights.sessions.own_tensors import gpu_of
from asyncfabric.weights.sessions.page_locks import page_locked

pytestmark = pytest.mark.anyio
PINNED_ALREADY, NO_MEMORY = 712, 2


class Library:
    """A libcuda that notes which memory it was given, and refuses what begins at some addresses."""

    def __init__(self, refused: dict[int, int] | None = None) -> None:
        self.locked: list[tuple[int, int]] = []
        self.refused = refused or {}

    def __getattr__(self, name: str) -> Any:
        return {"cuMemHostRegister_v2": self._lock, "cuMemHostUnregister": self._unlock}.get(name, lambda *_: 0)

    def _lock(self, base: Any, length: Any, flags: Any) -> int:
        if base.value in self.refused:
            return self.refused[base.value]
        self.locked.append((base.value, length.value))
        return 0

    def _unlock(self, base: Any) -> int:
        self.locked.remove(next(each for each in self.locked if each[0] == base.value))
        return 0


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


@pytest.fixture
def shadows() -> list[np.ndarray]:
    return [np.zeros(size, np.uint8) for size in (4096, 8192)]


def places(shadows: list[np.ndarray]) -> list[tuple[int, int]]:
    return [(each.ctypes.data, each.nbytes) for each in shadows]


async def test_shadows_are_locked_until_the_end_also_of_one_that_is_cancelled(shadows: list[np.ndarray]) -> None:
    library = Library()
    with anyio.CancelScope() as scope:
        async with page_locked(shadows, 0, Driver(library)):
            assert library.locked == places(shadows)
            scope.cancel()
            await anyio.sleep_forever()
    assert library.locked == []


async def test_what_somebody_else_locked_stays_locked(shadows: list[np.ndarray]) -> None:
    library = Library({shadows[0].ctypes.data: PINNED_ALREADY})
    async with page_locked(shadows, 0, Driver(library)):
        assert library.locked == places(shadows)[1:]
    assert library.locked == []


async def test_a_refusal_is_logged_and_what_was_locked_comes_back(
    shadows: list[np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    library = Library({shadows[1].ctypes.data: NO_MEMORY})
    with caplog.at_level(logging.WARNING):
        async with page_locked(shadows, 3, Driver(library)):
            assert library.locked == places(shadows)[:1]
    assert library.locked == []
    assert "GPU 3 slowly, without page locks: cuMemHostRegister: unknown error (2)" in caplog.text


def test_a_gpu_that_copies_is_named_with_its_number() -> None:
    tensors = {"weight": torch.zeros(2), "bias": torch.zeros(2, device="meta")}
    assert gpu_of(None, tensors) is None
    assert gpu_of("cuda:2", tensors) == gpu_of(torch.device("cuda", 2), tensors) == 2
    for wrong in ("cpu", "cuda"):
        with pytest.raises(ValueError, match=f"as 'cuda:0', got '{wrong}'"):
            gpu_of(wrong, tensors)

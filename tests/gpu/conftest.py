"""What the tests over real GPUs need: skips, loudly, where there is none."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import anyio
import pytest

import asyncfabric as af

sys.path.append(str(Path(__file__).parents[1] / "property"))  # whose scenes of updates are played here on GPUs
if int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or 0) < 32:  # some frameworks have it at 1
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # streams of several ranks in one process do not queue up


@functools.cache
def missing(rail: str) -> str:
    """Return why a rail cannot be opened here, or nothing."""

    async def attempt() -> None:
        async with af.open_fabric(af.FabricConfig(rails=(rail,))):
            pass

    try:
        import torch

        anyio.run(attempt, backend="trio")
        return "" if torch.cuda.is_available() else "torch sees no GPU"
    except (af.DeviceError, ImportError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if reason := missing("cuda:0"):
        pytest.skip(f"NO GPU TEST WAS RUN: {reason}")


@pytest.fixture
def far() -> int:
    """Return the last GPU of the machine: another one than cuda:0 where there are two."""
    import torch

    return torch.cuda.device_count() - 1

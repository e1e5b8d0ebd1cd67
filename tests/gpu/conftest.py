"""What the tests over real GPUs need: skips, loudly, where there is none."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from gpu_room import give_memory_back, place_on_gpus
from preloaded import start_server

import asyncfabric as af

sys.path.append(str(Path(__file__).parents[1] / "property"))  # whose fixtures of updates are played here on GPUs
if int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or 0) < 32:  # some frameworks have it at 1
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # streams of several ranks in one process do not queue up

EXCHANGES = ("_moe", "nvlink_processes", "deep_ep_face")


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


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers of this folder."""
    config.addinivalue_line("markers", "alone: needs all of a GPU; runs while no other test of this folder runs")
    config.addinivalue_line("markers", "exchange: ranks wait for each other on a GPU; one of these at a time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark exchanges and put them first, and tests that run alone last: the others wait for those once."""
    for item in items:
        if any(word in str(item.path) for word in EXCHANGES):
            item.add_marker("exchange")
    items.sort(key=lambda item: [_marked(item, "alone"), not _marked(item, "exchange")])


def _marked(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


@pytest.fixture(scope="session", autouse=True)
def _processes() -> None:
    start_server()


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if reason := missing("cuda:0"):
        pytest.skip(f"NO GPU TEST WAS RUN: {reason}")
    with place_on_gpus(_marked(request.node, "alone"), _marked(request.node, "exchange")):
        yield
        give_memory_back()


@pytest.fixture
def far() -> int:
    """Return the last GPU of the machine: another one than cuda:0 where there are two."""
    import torch

    return torch.cuda.device_count() - 1

"""Which tests share the GPUs of this machine: most of them, several at once, and one alone where it needs all of a GPU.

A test marked `alone` waits until the tests that run have ended, and the others wait until it has. Such a test measures
free memory or time, takes gigabytes, occupies every multiprocessor, or has kernels of several processes wait for each
other. Tests marked `exchange` run one at a time, whatever runs beside them: kernels of their ranks wait for each other,
and those of several processes take turns on a GPU in slices of time (1.4 s become 50 beside five others). The order
holds for every process of this user: workers of pytest, and a second pytest. Locks end with a process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCKS = Path(tempfile.gettempdir()) / f"asyncfabric-gpu-tests-{os.getuid()}"


@contextlib.contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    with (LOCKS / name).open("w") as file:
        fcntl.flock(file, how)
        yield


@contextlib.contextmanager
def place_on_gpus(alone: bool, exchange: bool) -> Iterator[None]:
    """Wait for a place beside the others, or for all of them to end; in the order of asking, so that nobody starves."""
    LOCKS.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as place:
        if exchange:
            place.enter_context(_locked("exchange", fcntl.LOCK_EX))
        with _locked("turn", fcntl.LOCK_EX):
            place.enter_context(_locked("room", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield


def give_memory_back() -> None:
    """Return to the driver what the allocators of torch and cupy of this process keep for later tests."""
    import torch

    torch.cuda.empty_cache()
    if (cupy := sys.modules.get("cupy")) is not None:
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()

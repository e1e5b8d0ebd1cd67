"""Ranks of DeepEP's interfaces as threads of one process, each with a buffer of its own, and tokens that they send."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asyncfabric.moe import MissingRankError

sys.path.append(str(Path(__file__).parents[2] / "property"))
from thread_comm import ThreadComm

PATIENCE_S = 60.0
Run = Callable[..., list[Any]]


@contextmanager
def ranks_of(count: int, opened: Callable[..., Any]) -> Iterator[Run]:
    """Run functions on all of so many ranks at once: run(body, **settings) returns what body(buffer) did at each.

    The first call opens the buffers, by opened(comm, **settings); they are destroyed at the end.
    """
    values, barrier = [None] * count, threading.Barrier(count)
    buffers: list[Any] = []

    def on_all(body: Callable[[Any], Any], **settings: Any) -> list[Any]:
        if not buffers:
            comms = [ThreadComm(rank, values, barrier, PATIENCE_S) for rank in range(count)]
            buffers.extend(pool.map(lambda comm: opened(comm, **settings), comms))
        running = [pool.submit(body, buffer) for buffer in buffers]
        failed = [error for each in running if (error := each.exception()) is not None]
        failed.sort(key=lambda error: isinstance(error, MissingRankError))  # others miss the rank that failed
        for error in failed:
            raise error
        return [each.result() for each in running]

    with ThreadPoolExecutor(count) as pool:
        try:
            yield on_all
        finally:
            for _ in pool.map(lambda buffer: buffer.destroy(), buffers):
                pass


def drawn_tokens(rank: int, seed: int, count: int, hidden: int, experts: int, top_k: int) -> tuple[Any, Any, Any]:
    """Return so many tokens, their experts and weights; some choices are masked."""
    draws = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(count, hidden, generator=draws, dtype=torch.float32).bfloat16()
    idx = torch.rand(count, experts, generator=draws, dtype=torch.float32).topk(top_k, dim=1)[1]
    idx[torch.rand(count, top_k, generator=draws, dtype=torch.float32) < 0.15] = -1
    return x, idx, torch.rand(count, top_k, generator=draws, dtype=torch.float32)

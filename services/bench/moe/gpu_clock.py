"""Times of work on GPUs by CUDA events, for `bench moe --device cuda`: ranks meet, launches are queued behind that.

Runs in measured processes that share a process group of NCCL. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import trio

Body = Callable[[int], Any]
WARM_ROUNDS = 2
SLEEP_CYCLES, SHORT_SLEEP_CYCLES = 120_000_000, 800_000


def queued_times(bodies: dict[str, Body], batches: int, rounds: int) -> dict[str, list[float]]:
    """Return microseconds of each body of each round, done in turn; the GPU goes from one launch to the next.

    Each batch of rounds is queued behind a sleeping kernel; the first batch warms up. Blocks.
    """
    found: dict[str, list[float]] = {name: [] for name in bodies}
    for batch in range(batches + 1):
        torch.cuda.synchronize()
        dist.barrier()
        sleep(SLEEP_CYCLES)
        marks = [[_event() for _ in range(len(bodies) + 1)] for _ in range(rounds)]
        for number, events in enumerate(marks):
            events[0].record()
            for body, event in zip(bodies.values(), events[1:], strict=True):
                body(batch * rounds + number)
                event.record()
        torch.cuda.synchronize()
        if batch:
            for events in marks[WARM_ROUNDS:]:
                _note(found, events)
    return found


async def single_times(bodies: dict[str, Body], rounds: int) -> dict[str, list[float]]:
    """Return the same where the event loop is needed while GPUs work: one round after the other.

    The GPUs, or the processes where some share one, meet by a small all_reduce before each round, behind a sleeping
    kernel; then the loop waits in a thread.

    Cancellation: the round under way goes on.
    """
    found: dict[str, list[float]] = {name: [] for name in bodies}
    met = torch.ones(1, device="cuda" if dist.get_backend() != "gloo" else "cpu")
    for number in range(rounds + WARM_ROUNDS):
        events = [_event() for _ in range(len(bodies) + 1)]
        sleep(SHORT_SLEEP_CYCLES)
        dist.all_reduce(met)
        events[0].record()
        for body, event in zip(bodies.values(), events[1:], strict=True):
            body(number)
            event.record()
        await trio.to_thread.run_sync(torch.cuda.synchronize, torch.cuda.current_device())
        if number >= WARM_ROUNDS:
            _note(found, events)
    return found


def sleep(cycles: int) -> None:
    """Launch a kernel that does nothing for so many cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _note(found: dict[str, list[float]], events: list[Any]) -> None:
    for name, begin, end in zip(found, events, events[1:], strict=False):
        found[name].append(begin.elapsed_time(end) * 1e3)

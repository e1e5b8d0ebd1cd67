"""Waits of an asyncio program for a blocking fabric, in threads that end with the wait, and for torch's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import torch

from asyncfabric.integrations.weight_stream.post import WeightPost

Result = TypeVar("Result")


async def in_thread(post: WeightPost, wait: Callable[[], Result]) -> Result:
    """Run a wait for messages of a post in a thread.

    Cancellation: the post is stopped, and its thread has ended before it goes on.
    """
    running = asyncio.get_running_loop().run_in_executor(None, wait)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        post.stop()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # it was stopped
        raise


def settle(memory: torch.Tensor) -> None:
    """Block until what the current stream of a GPU was given has run, where memory is on one."""
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()

"""Which event loop runs the caller, and the adapter for it: the third, for threads, is in `threads`.

Only the adapter of a loop that is there is imported, so a program of asyncio needs no trio. Event loop's thread.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher
    from asyncfabric._bridge.loop_adapter import EventLoopAdapter


def open_adapter(dispatcher: CompletionDispatcher) -> EventLoopAdapter:
    """Return the adapter of the event loop that runs the caller; raises RuntimeError outside of trio and asyncio."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        from asyncfabric._bridge.trio_adapter import TrioAdapter

        return TrioAdapter(dispatcher)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("a fabric is opened from a task of trio or asyncio, but no event loop runs here") from None
    from asyncfabric._bridge.asyncio_adapter import AsyncioAdapter

    return AsyncioAdapter(dispatcher, loop)

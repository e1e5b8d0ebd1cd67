"""Descriptors of pages: given to the other ranks of this host over a Unix socket, and taken from theirs.

Runs on the event loop's thread. The socket is in a folder of the owner, so that only ranks of one host and one user
meet.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import anyio
import anyio.abc

from asyncfabric.moe.faults import missing, shortly_before_deadline


async def swap_descriptors(
    what: str, descriptor: int, listener: anyio.abc.SocketListener, places: Mapping[int, str]
) -> dict[int, int]:
    """Give our descriptor to as many as ask, one for each place, and return those of the other ranks.

    Args:
        what: is done, for the error.
        descriptor: to give; stays the caller's.
        listener: where the others ask.
        places: the socket of each other rank.

    Raises:
        MissingRankError: a socket cannot be reached, or did not answer before the caller's deadline.

    Cancellation: what was taken is closed again; then it goes on.
    """
    taken: dict[int, int] = {}
    refused: dict[int, BaseException] = {}
    given: list[int] = []
    asked = anyio.Event()

    async def give(stream: anyio.abc.SocketStream) -> None:
        assert isinstance(stream, anyio.abc.UNIXSocketStream)
        async with stream:
            await stream.send_fds(b"pages", [descriptor])
        given.append(1)
        if len(given) == len(places):
            asked.set()

    async def take(rank: int) -> None:
        try:
            async with await anyio.connect_unix(places[rank]) as stream:
                _, found = await stream.receive_fds(16, 1)
            taken[rank] = found[0]
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            refused[rank] = error
            asked.set()

    try:
        with shortly_before_deadline() as scope:
            async with anyio.create_task_group() as serving:
                serving.start_soon(listener.serve, give)
                async with anyio.create_task_group() as taking:
                    for rank in places:
                        taking.start_soon(take, rank)
                if places:
                    await asked.wait()
                serving.cancel_scope.cancel()
        if refused:
            why = "; ".join(str(error) or type(error).__name__ for error in refused.values())
            raise missing(f"{what} (its socket: {why}; is it on this host?)", refused, lost=True)
        if scope.cancelled_caught:
            raise missing(what, set(places) - set(taken) or set(places), lost=False)
    except BaseException:
        for found in taken.values():
            os.close(found)
        raise
    return taken

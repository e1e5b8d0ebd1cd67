"""PeerLoss: reports, once, that a peer is lost; for ends of the protocol that do not wait for its arrivals.

Runs on the event loop's thread, one task per peer. The fabric reports a loss to tasks that wait for a
counter with that peer declared, so each task waits for a count that never comes.
"""

from __future__ import annotations

from collections.abc import Callable

from anyio.abc import TaskGroup

from asyncfabric import ClosedError, Fabric, Peer, PeerError

NEVER = 1 << 62


class PeerLoss:
    """Watches peers in a task group; `on_loss(incarnation, reason)` is called for each that is lost."""

    def __init__(self, fabric: Fabric, tasks: TaskGroup, on_loss: Callable[[int, str], None]) -> None:
        """Watch nobody yet."""
        self._tasks = tasks
        self._on_loss = on_loss
        self._counter = fabric.counter()
        self._watched: set[int] = set()

    def watch(self, peer: Peer) -> None:
        """Watch a peer until it is lost."""
        if peer.incarnation not in self._watched:
            self._watched.add(peer.incarnation)
            self._tasks.start_soon(self._watch, peer)

    def close(self) -> None:
        """Watch nobody any more."""
        self._counter.close()

    async def _watch(self, peer: Peer) -> None:
        try:
            await self._counter.wait(NEVER, peers=[peer])
        except PeerError as error:
            self._watched.discard(peer.incarnation)
            self._on_loss(peer.incarnation, str(error))
        except ClosedError:
            self._watched.discard(peer.incarnation)

"""SupervisedChild: one place under a supervisor, which holds one life after another; and what can live there.

Runs on the event loop's thread. Restarting is decided by `supervisor`; here is one start and one end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from asyncfabric.actors.death import Death


class Living(Protocol):
    """What a supervisor keeps alive: the life of an actor, or another supervisor."""

    async def run(self, started: Callable[[], None]) -> None:
        """Live; call `started` when begun, return when ended in good order, raise what failed first.

        Cancellation: ends it.
        """
        ...

    def forewarn(self, because: Death) -> None:
        """Notify those who wait for it that it ends."""
        ...


class SupervisedChild:
    """A place under a supervisor.

    Attributes:
        name: full name on the node.
        living: what lives here now, or lived last; None before its first life was made.
        begun: set when the present life started or ended, whichever came first.
        ended: set when nothing of the present life runs any more.
        failure: how the last life failed, None when it did not.
        made: whether `living` is the present life, and not the one before.
        adopted: whether it started once, so that its failures are the supervisor's and not the spawner's.
        stopping: whether its supervisor ends it.
    """

    def __init__(self, name: str, make: Callable[[], Living]) -> None:
        self.name: str = name
        self.living: Living | None = None
        self.begun: trio.Event = trio.Event()
        self.ended: trio.Event = trio.Event()
        self.failure: Exception | None = None
        self.adopted: bool = False
        self.stopping: bool = False
        self.made: bool = False
        self._make = make
        # Shielded: the supervisor alone ends its children, one by one, in the reverse of the order of their start.
        self._scope = trio.CancelScope(shield=True)

    def renew(self) -> None:
        """Prepare the next life."""
        self.begun, self.ended = trio.Event(), trio.Event()
        self.failure, self.stopping, self.made = None, False, False
        self._scope = trio.CancelScope(shield=True)

    async def run(self, ended: Callable[[SupervisedChild], None]) -> None:
        """Run one life, keep how it ended, and notify `ended`.

        Cancellation: through `stop` only.
        """
        try:
            with self._scope:
                await trio.lowlevel.checkpoint()
                self.living = self._make()
                self.made = True
                await self.living.run(self._start)
        except Exception as failure:
            self.failure = failure
        finally:
            self.ended.set()
            self.begun.set()
            ended(self)

    async def stop(self, because: Death) -> None:
        """End the present life and return when nothing of it runs.

        Cancellation: shielded; the life bounds its own end.
        """
        self.stopping = True
        if self.living is not None and not self.ended.is_set():
            self.living.forewarn(because)
        self._scope.cancel()
        with trio.CancelScope(shield=True):
            await self.ended.wait()

    def _start(self) -> None:
        self.adopted = True
        self.begun.set()

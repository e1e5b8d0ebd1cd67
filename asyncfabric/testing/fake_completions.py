"""The completion ring of a fake engine: a real eventfd and the arm / sleep / disarm / poll protocol.

Any thread pushes under the lock of the network; one thread, the event loop, takes. The fd is rung only when the loop
announced that it is going to sleep, so a thousand completions cost one wake-up.
"""

from __future__ import annotations

import os
from collections import deque

from asyncfabric._bridge.engine import Completion, CompletionKind
from asyncfabric._bridge.status import StatusCode


class CompletionRing:
    """Completions that nobody took yet. They are never dropped."""

    def __init__(self, statistics: dict[str, int]) -> None:
        self.fd: int = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._statistics = statistics
        self._waiting: deque[Completion] = deque()
        self._armed = False
        self._message_announced = False
        self.unpolled_ops: int = 0

    def push(
        self,
        kind: CompletionKind,
        cookie: int = 0,
        code: StatusCode = StatusCode.OK,
        *,
        raw: int = 0,
        value: int = 0,
        bytes: int = 0,
        duration_ns: int = 0,
        rails: int = 0,
        peer: int = 0,
    ) -> None:
        """Publish one completion and wake the loop if it sleeps."""
        if kind is CompletionKind.MESSAGE:
            if self._message_announced:
                return
            self._message_announced = True
        self.unpolled_ops += kind is CompletionKind.OP
        self._waiting.append(
            Completion(cookie, int(kind), int(code), int(code.kind), raw, value, bytes, duration_ns, rails, peer)
        )
        if self._armed:
            self._armed = False
            self._statistics["loop_wakes"] += 1
            os.eventfd_write(self.fd, 1)

    def __len__(self) -> int:
        return len(self._waiting)

    def arm(self) -> bool:
        """Promise to sleep; False when something waits already."""
        self._armed = not self._waiting and self.fd >= 0
        return self._armed

    def disarm(self) -> None:
        """Clear the fd after a wake-up."""
        self._armed = False
        if self.fd >= 0:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass  # woken by something else, for example a cancellation

    def poll(self, limit: int) -> list[Completion]:
        """Take up to `limit` completions in the order of their arrival."""
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        self.unpolled_ops -= sum(one.kind == CompletionKind.OP for one in taken)
        if self._message_announced and any(one.kind == CompletionKind.MESSAGE for one in taken):
            self._message_announced = False
        return taken

    def close(self) -> None:
        """Close the fd; what waits can still be taken."""
        self._armed = False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

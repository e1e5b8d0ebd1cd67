"""Link: what this layer needs of a control connection to other nodes, as protocols.

Runs on the event loop's thread; `asyncfabric.control` has the link over sockets, `asyncfabric.testing` one in memory.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from anyio.abc import ObjectReceiveStream

from asyncfabric.control.messages import Identity

__all__ = ["Arrival", "Identity", "Link", "SessionChange"]


class Arrival(Protocol):
    """A message from a peer."""

    @property
    def sender(self) -> Identity:
        """Who sent it."""
        ...

    @property
    def body(self) -> bytes:
        """What was sent."""
        ...

    @property
    def trace(self) -> str | None:
        """The W3C trace context that it was sent with."""
        ...


class SessionChange(Protocol):
    """What became of the session with a peer."""

    @property
    def peer(self) -> Identity:
        """Whose session."""
        ...

    @property
    def state(self) -> Literal["ready", "draining", "lost"]:
        """The state that it is in now."""
        ...

    @property
    def reason(self) -> str:
        """Why, in words."""
        ...


class Link(Protocol):
    """A node's control connections. Messages between two nodes arrive in order, or the session is lost."""

    @property
    def identity(self) -> Identity:
        """Who this node is."""
        ...

    @property
    def address(self) -> str:
        """Where peers connect to."""
        ...

    async def connect(self, address: str) -> Identity:
        """Connect to a peer and return who it is.

        Cancellation: only this wait ends.
        """
        ...

    async def send(self, to: Identity, channel: str, body: bytes, trace: str | None = None) -> None:
        """Send to a peer; waits for room. Raises PeerError when the peer is lost, draining or unknown.

        Cancellation: nothing was sent.
        """
        ...

    def listen(self, channel: str) -> AbstractAsyncContextManager[ObjectReceiveStream[Arrival]]:
        """Receive what peers send on a channel, while the context is open."""
        ...

    def watch(self) -> AbstractAsyncContextManager[ObjectReceiveStream[SessionChange]]:
        """Receive what becomes of sessions, while the context is open."""
        ...

    async def disconnect(self, peer: Identity) -> None:
        """End the session with a peer.

        Cancellation: the session ends all the same.
        """
        ...

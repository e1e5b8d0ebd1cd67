"""Channel: carries the typed messages of one member to and from others by name; what its user calls and receives.

Event loop's thread. What every channel guarantees stands here once; `local`, `link`, `fabric` and `store` carry them:

CH-1 order       the messages of one sender to one recipient are received in the order in which they were sent.
CH-2 at most once    what is received is a prefix of what was sent, each message once, from the sender that is named.
CH-3 losses      PeerFound comes before the first message of a peer, PeerLost once, after its last. A peer that comes
                 back is found anew, and nothing of its earlier session arrives then.
CH-4 pressure    a sender has at most `window` messages at a recipient that were not received: its `send` waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Message = TypeVar("Message")

WINDOW = 1024
"""Messages of one sender to one recipient that may wait to be received."""


@dataclass(frozen=True, slots=True)
class PeerFound:
    """A session with a peer begins: it can be sent to."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The session with a peer has ended, and why; nothing more of it comes."""

    reason: str


@dataclass(frozen=True, slots=True)
class Codec(Generic[Message]):
    """How messages become bytes and bytes messages.

    Attributes:
        encode: returns the bytes of a message.
        decode: returns the message of these bytes; raises RemoteProtocolError for anything that is none.
    """

    encode: Callable[[Message], bytes]
    decode: Callable[[bytes], Message]


class Channel(Protocol[Message]):
    """Carries the messages of one member. `async for peer, message in channel` receives until it is closed."""

    async def send(self, to: str, message: Message) -> None:
        """Send a message to a peer; returns when it is on its way, once the peer's window has room.

        Raises:
            PeerError: there is no session with `to`: none yet, or it was lost.
            ClosedError: this channel is closed.

        Cancellation: the message has left whole or not at all.
        """

    async def receive(self) -> tuple[str, Message | PeerFound | PeerLost]:
        """Return the next message or change, and from whom, or of whom, it is.

        Raises:
            ClosedError: the channel is closed, and everything that came before was received.

        Cancellation: nothing is lost.
        """

    def take_nowait(self) -> list[tuple[str, Message | PeerFound | PeerLost]]:
        """Return what is there already, in order, perhaps nothing: many messages for one wake-up."""

    async def aclose(self) -> None:
        """Leave: the peers receive PeerLost after what was sent before; nothing more comes here.

        Cancellation: the peers find out as if the process had died.
        """

    def __aiter__(self) -> Channel[Message]: ...

    async def __anext__(self) -> tuple[str, Message | PeerFound | PeerLost]: ...

"""Arrival: a version on its way into a replica: its number, the scope of the task that carries it, where messages go.

Runs on the event loop's thread.
"""

from __future__ import annotations

import anyio

from asyncfabric import RegionKey
from asyncfabric.weights.update.catching_up import Fetching
from asyncfabric.weights.update.forwarding import Forwarding
from asyncfabric.weights.update.intake import Intake
from asyncfabric.weights.update.landing import Arrivals
from asyncfabric.weights.update.messages import Coded, Opened, Taken
from asyncfabric.weights.update.runs import Gate


class Arrival:
    """A version on its way.

    Attributes:
        number: which arrival of this receiver; a version that is begun again has another one (WC-7).
        version, scope: of it.
        intake, forwarding, coded, fetching: what takes part, None before or without.
    """

    def __init__(self, number: int, version: int) -> None:
        """Begin with nothing."""
        self.number: int = number
        self.version: int = version
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.intake: Intake | None = None
        self.forwarding: Forwarding | None = None
        self.coded: Arrivals | None = None
        self.fetching: Fetching | None = None

    def take(self, sender: str, message: Opened | Coded | Taken) -> bool:
        """Hand a message of this version on; return whether there was somebody to take it.

        Raises RemoteProtocolError for what is not the sender's to say.
        """
        if isinstance(message, Opened) and self.forwarding is not None:
            self.forwarding.open(
                sender, Gate(RegionKey.from_bytes(message.key), message.imm, message.share_bytes), message.landing
            )
        elif isinstance(message, Coded) and self.coded is not None:
            self.coded.take(sender, message)
        elif isinstance(message, Taken) and self.forwarding is not None and self.forwarding.coded is not None:
            self.forwarding.coded.take(sender, message)
        else:
            return False
        return True

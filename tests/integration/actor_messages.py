"""What the actor tests' two processes send to each other."""

from __future__ import annotations

from asyncfabric.actors import Message, Reference


class Add(Message[int]):
    a: int
    b: int


class Fail(Message[None]):
    """Answered with an error."""


class Break(Message[None]):
    """Ends the actor."""


class Wait(Message[None]):
    """Never answered."""


class Write(Message[None]):
    """Answered never: writes through the fabric until it is cancelled."""


class Waiting(Message[list[str]]):
    """Answered with what the fabric waits for, and what the handlers did."""


class Relay(Message[int]):
    to: Reference
    a: int
    b: int

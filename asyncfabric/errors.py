"""Errors of the whole house: the class states how much is broken, so what to do next.

Common: imported by every layer, imports none. The translation from native status codes is in
`asyncfabric._bridge.faults`; this file only names what can be raised.
"""

from __future__ import annotations

import anyio


class FabricError(Exception):
    """Base of all errors of asyncfabric.

    Attributes:
        remedy: the first things to check, a sentence for people.
        raw: number from the NIC, the library or the OS (errno), 0 when there is none.
    """

    def __init__(self, message: str, *, remedy: str = "", raw: int = 0) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.raw = raw

    def __str__(self) -> str:
        """Return the message, followed by the remedy when there is one."""
        message = super().__str__()
        return f"{message} ({self.remedy})" if self.remedy else message


class BusyError(FabricError, anyio.WouldBlock):
    """A bounded queue is full; nothing is broken: drain and retry."""


class ClosedError(FabricError, anyio.ClosedResourceError):
    """You closed or released the object."""


class BrokenError(FabricError, anyio.BrokenResourceError):
    """The world broke it."""


class TransferError(BrokenError):
    """One transfer failed; the peer and the fabric go on.

    Attributes:
        bytes: bytes that had left for certain when it failed; more may have.
    """

    def __init__(self, message: str, *, remedy: str = "", raw: int = 0, bytes: int = 0) -> None:
        super().__init__(message, remedy=remedy, raw=raw)
        self.bytes = bytes


class PeerError(BrokenError):
    """One peer died, stopped answering or could not be reached; others go on.

    Attributes:
        bytes: bytes that had left for certain when it failed; more may have.
    """

    def __init__(self, message: str, *, remedy: str = "", raw: int = 0, bytes: int = 0) -> None:
        super().__init__(message, remedy=remedy, raw=raw)
        self.bytes = bytes


class DeviceError(BrokenError):
    """One rail, NIC port or GPU failed, or its library is missing."""


class ProtocolError(FabricError):
    """The control plane broke its protocol."""


class LocalProtocolError(ProtocolError):
    """We broke the control protocol."""


class RemoteProtocolError(ProtocolError):
    """The other side broke the control protocol."""


class StaleKeyError(FabricError):
    """A key of a revoked region or of an earlier incarnation of a peer; ask its owner for a new one."""


class ActorError(FabricError):
    """An actor failed.

    Attributes:
        actor: who was asked, as `name#incarnation on node`.
        origin: whose code failed first, in the same form; the same as `actor` unless the failure came from elsewhere.
        kind: name of the type of the first failure, empty when nothing raised.
        traceback: text of the first failure's traceback, also when it was in another process.
    """

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        raw: int = 0,
        actor: str = "",
        origin: str = "",
        kind: str = "",
        traceback: str = "",
    ) -> None:
        super().__init__(message, remedy=remedy, raw=raw)
        self.actor = actor
        self.origin = origin
        self.kind = kind
        self.traceback = traceback
        if traceback:
            self.add_note(f"the first failure was in {origin}:\n{traceback.rstrip()}")


class ActorDied(ActorError):
    """The actor that was asked died, was stopped or its node was lost; it may have seen the message."""


class RemoteError(ActorError):
    """The actor that was asked raised, in this process or in another; it lives on."""


class InternalError(FabricError):
    """Our own invariant broke: please report it."""

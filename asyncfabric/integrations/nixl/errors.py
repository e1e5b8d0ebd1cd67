"""The error classes of NIXL, by its names, and which of them each error of a fabric becomes.

Any thread. Callers catch them by class; the text is ours: what happened, to which agent or memory, what to check.
"""

from __future__ import annotations

from asyncfabric.errors import ClosedError, DeviceError, FabricError, PeerError, StaleKeyError


class nixlNotPostedError(Exception):
    """The transfer was not posted yet, or is not complete where it has to be."""


class nixlInvalidParamError(Exception):
    """An argument is wrong: lengths that differ, an index out of range, a released handle."""


class nixlBackendError(Exception):
    """What moves the data failed."""


class nixlNotFoundError(Exception):
    """No such agent, backend or registration."""


class nixlMismatchError(Exception):
    """Bytes that are no metadata of an agent, or of another version."""


class nixlNotAllowedError(Exception):
    """Not permitted to this agent."""


class nixlRepostActiveError(Exception):
    """The transfer was posted again while it is under way."""


class nixlUnknownError(Exception):
    """None of the others."""


class nixlNotSupportedError(Exception):
    """The face does not offer it."""


class nixlRemoteDisconnectError(Exception):
    """The remote agent died, closed or cannot be reached."""


class nixlCancelledError(Exception):
    """The transfer was cancelled."""


class nixlNoTelemetryError(Exception):
    """Telemetry is off in the configuration of the agent."""


def translated(error: Exception, what: str) -> Exception:
    """Return the NIXL error for one of a fabric; `what` names the call and its objects."""
    text = f"{what}: {error}"
    if isinstance(error, PeerError):
        return nixlRemoteDisconnectError(text)
    if isinstance(error, StaleKeyError):
        return nixlNotFoundError(f"{text}; the remote agent has deregistered this memory: load its metadata again")
    if isinstance(error, ClosedError):
        return nixlNotFoundError(f"{text}; the memory was deregistered, or its agent closed")
    if isinstance(error, DeviceError):
        return nixlBackendError(f"{text}; ASYNCFABRIC_NIXL_RAILS, or ASYNCFABRIC_RAILS, chooses the rails of an agent")
    if isinstance(error, FabricError):
        return nixlBackendError(text)
    if isinstance(error, (TypeError, ValueError)):
        return nixlInvalidParamError(text)
    return nixlUnknownError(text)

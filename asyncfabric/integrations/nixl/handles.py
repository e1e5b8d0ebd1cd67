"""The handles of NIXL's Python interface, by its names; callers hold them and give them back.

Any thread. A handle that is dropped without release() cancels its transfer; its memory is free once the agent
deregistered it.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncfabric.integrations.nixl.core import AgentCore
from asyncfabric.integrations.nixl.errors import nixlInvalidParamError
from asyncfabric.integrations.nixl.plan import AlikeBlocks, Side
from asyncfabric.integrations.nixl.remotes import RemoteAgent
from asyncfabric.integrations.nixl.request import Request


@dataclass(frozen=True, slots=True)
class nixlXferTelemetry:
    """Times of a complete transfer in microseconds, its bytes and its descriptors."""

    startTime: int
    postDuration: int
    xferDuration: int
    totalBytes: int
    descCount: int


class nixl_prepped_dlist_handle:
    """A prepared list: blocks that were found in their registrations; `remote` None is the local side."""

    __slots__ = ("_alike", "_core", "_released", "_remote", "_side")

    def __init__(self, core: AgentCore, side: Side, remote: RemoteAgent | None) -> None:
        self._core = core
        self._side = side
        self._alike = AlikeBlocks.of(side)
        self._remote = remote
        self._released = False

    def release(self) -> None:
        """Forget the list; idempotent. Transfers that were made from it go on."""
        self._released = True

    def __len__(self) -> int:
        return len(self._side.offsets)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        where = "local" if self._remote is None else f"of agent {self._remote.name!r}"
        return f"nixl_prepped_dlist_handle({len(self)} descriptors, {where}, released={self._released})"


class nixl_xfer_handle:
    """A transfer, to post and to look at."""

    __slots__ = ("_core", "_released", "_request")

    def __init__(self, core: AgentCore, request: Request) -> None:
        self._core = core
        self._request = request
        self._released = False

    def release(self) -> None:
        """Cancel the transfer if it is under way, wait until nothing touches its memory, forget it; idempotent.

        Raises:
            nixlBackendError: something may still touch memory after twice the drain deadline; release it again.
        """
        if not self._released:
            self._request.release()
            self._released = True

    def __del__(self) -> None:
        if not self._released:
            self._core.drop(self._request)

    def __repr__(self) -> str:
        return f"nixl_xfer_handle({self._request.what}, released={self._released})"


def request_of(handle: nixl_xfer_handle) -> Request:
    """Return what a handle stands for.

    Raises:
        nixlInvalidParamError: no handle of a transfer, or a released one.
    """
    if not isinstance(handle, nixl_xfer_handle):
        raise nixlInvalidParamError(f"expected a transfer handle, got {type(handle).__name__} {handle!r}")
    if handle._released:
        raise nixlInvalidParamError(f"{handle!r} was released")
    return handle._request


def check_sides(local: nixl_prepped_dlist_handle, remote: nixl_prepped_dlist_handle, core: AgentCore) -> None:
    """Check that prepared lists are fit for the local and the remote side, which nearly all are.

    Raises:
        nixlInvalidParamError: as from `prepared_of`.
    """
    if not (
        local.__class__ is remote.__class__ is nixl_prepped_dlist_handle
        and local._core is remote._core is core
        and local._remote is None is not remote._remote
        and not (local._released or remote._released)
    ):
        prepared_of(local, core, local=True)
        prepared_of(remote, core, local=False)


def prepared_of(handle: nixl_prepped_dlist_handle, core: AgentCore, *, local: bool) -> nixl_prepped_dlist_handle:
    """Return a prepared list that is fit for one side.

    Raises:
        nixlInvalidParamError: no handle of a list, a released one, of another agent or of the other side.
    """
    side = "local" if local else "remote"
    if not isinstance(handle, nixl_prepped_dlist_handle):
        raise nixlInvalidParamError(f"the {side} side must be a prepared list, got {type(handle).__name__} {handle!r}")
    if handle._released:
        raise nixlInvalidParamError(f"{handle!r} was released")
    if handle._core is not core:
        raise nixlInvalidParamError(f"{handle!r} was prepared by agent {handle._core.name!r}, not by {core.name!r}")
    if local != (handle._remote is None):
        raise nixlInvalidParamError(
            f"{handle!r} cannot be the {side} side: prepare it with agent_name "
            + ('"NIXL_INIT_AGENT"' if local else "the name of the remote agent")
        )
    return handle

"""AgentCore: what one agent consists of: a fabric, its registrations, the remote agents it knows, and notes.

Any thread. Handles and the caretaker hold it, so that an agent that is dropped can be closed whatever they do.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import ExitStack
from threading import Event, Lock, Thread, current_thread
from typing import TYPE_CHECKING

from asyncfabric import FabricConfig, blocking
from asyncfabric.errors import FabricError
from asyncfabric.integrations.nixl import metadata
from asyncfabric.integrations.nixl.blocks import Blocks
from asyncfabric.integrations.nixl.errors import (
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    translated,
)
from asyncfabric.integrations.nixl.memory import Memory
from asyncfabric.integrations.nixl.metadata import KeyTable
from asyncfabric.integrations.nixl.note_exchange import NoteExchange
from asyncfabric.integrations.nixl.notes import NoteQueue
from asyncfabric.integrations.nixl.plan import Side
from asyncfabric.integrations.nixl.ranges import NotCoveredError
from asyncfabric.integrations.nixl.remotes import RemoteAgent
from asyncfabric.integrations.nixl.request import Request

if TYPE_CHECKING:
    from asyncfabric._api.opening import EngineFactory

logger: logging.Logger = logging.getLogger(__name__)


class AgentCore:
    """One agent, without the foreign interface."""

    def __init__(self, name: str, config: FabricConfig, engine_factory: EngineFactory | None = None) -> None:
        self.name = name
        self.title: bytes = name.encode()
        if len(self.title) > 255:
            raise nixlInvalidParamError(f"the name of an agent has at most 255 bytes, got {len(self.title)}")
        self._stack = ExitStack()
        try:
            self.fabric: blocking.Fabric = self._stack.enter_context(
                blocking.open_fabric(config, engine_factory=engine_factory)
            )
        except FabricError as error:
            raise translated(error, f"opening the fabric of agent {name!r}") from error
        self.memory: Memory = Memory(self.fabric)
        self.exchange: NoteExchange = NoteExchange(self.title, self.fabric, self.wait_for_room)
        self.notes: NoteQueue = self.exchange.queue
        self.noted: set[Request] = set()  # posted, with a note to send or to withdraw at their end
        self.leftovers: deque[Request] = deque()  # their handles were dropped
        self.stopped: Event = Event()
        self.caretaker: Thread | None = None
        self._lock = Lock()
        self._remotes: dict[str, RemoteAgent] = {}
        self._own: RemoteAgent | None = None

    def metadata(self, blocks: Blocks | None = None, *, address: bool = True) -> bytes:
        """Return the metadata of the agent: of all its memory, or of exactly these registrations; where it is, or not.

        Raises:
            nixlNotFoundError: one of them is not registered.
        """
        serial, entries = self.memory.entries(blocks)
        where = self.fabric.address if address else None
        return metadata.pack(self.name, where, serial, blocks is None, entries)

    def add_remote(self, data: bytes) -> str:
        """Take the metadata of another agent and return its name; a new life of it replaces what was known.

        Raises:
            nixlMismatchError: the bytes are no metadata.
            nixlInvalidParamError: it is the agent's own.
            nixlNotFoundError: it is a part without the address of an agent that is not known.
        """
        known = metadata.unpack(data)
        if known.name == self.name:
            raise nixlInvalidParamError(f"this is metadata of an agent {self.name!r}, the name of this agent itself")
        with self._lock:
            remote = self._remotes.get(known.name)
            if remote is not None and known.address in (None, remote.address):
                remote.learn(known)
                return known.name
            if known.address is None:
                raise nixlNotFoundError(
                    f"a part of the metadata of agent {known.name!r}, which is not known here: it comes without the "
                    "address, so give the whole first, or a part with inc_conn_info=True"
                )
            replaced, remote = remote, RemoteAgent(self.fabric, known, known.address)
            self._remotes[known.name] = remote
        if replaced is not None:
            replaced.forget()
        try:
            remote.peer()
        except Exception as error:  # it is tried again by its first use, which raises
            logger.warning("agent %r is known, but not reached yet: %s", known.name, error)
        return known.name

    def remove_remote(self, name: str) -> None:
        """Forget an agent and drop the connection to it; unknown ones are forgotten already."""
        with self._lock:
            remote = self._remotes.pop(name, None)
        if remote is not None:
            remote.forget()

    def knows(self, name: str, blocks: Blocks | None = None) -> bool:
        """Return whether metadata of an agent is here, and covers these blocks."""
        try:
            remote = self.remote(name)
            if blocks is not None and len(blocks):
                self._table_of(remote).find(blocks)
        except (nixlNotFoundError, NotCoveredError):
            return False
        return True

    def remote(self, name: str) -> RemoteAgent:
        """Return a remote agent, or this one under its own name; raises nixlNotFoundError for others."""
        if name == self.name:
            return self._itself()
        remote = self._remotes.get(name)
        if remote is None:
            raise nixlNotFoundError(
                f"agent {name!r} is not known to {self.name!r}, which knows {sorted(self._remotes)}: give its metadata "
                "to add_remote_agent() first"
            )
        return remote

    def local_side(self, blocks: Blocks) -> Side:
        """Find blocks in the agent's own registrations; raises nixlNotFoundError naming the first that is in none."""
        try:
            return Side.of(self.memory.table().find(blocks), blocks.lengths)
        except NotCoveredError as missing:
            raise nixlNotFoundError(f"local descriptor {missing.position}: {missing}; register it first") from None

    def remote_side(self, remote: RemoteAgent, blocks: Blocks) -> Side:
        """Find blocks in the registrations of a remote agent; raises nixlNotFoundError naming the first in none."""
        try:
            return Side.of(self._table_of(remote).find(blocks), blocks.lengths)
        except NotCoveredError as missing:
            raise nixlNotFoundError(
                f"remote descriptor {missing.position}: {missing} of agent {remote.name!r}, as far as its metadata "
                "is known here; load what it returns from get_agent_metadata() after registering"
            ) from None

    def wait_for_room(self, what: str) -> None:
        """Return when a transfer may be submitted again; raises nixlBackendError after the drain deadline."""
        deadline = self.fabric.config.drain_deadline
        try:
            self.fabric.wait_writable(deadline=deadline)
        except TimeoutError as error:
            raise nixlBackendError(f"{what}: {error}; targets may not take their notes") from None

    def watch_note(self, request: Request) -> None:
        """Have the caretaker bring a posted transfer to its end, if its caller does not: its note depends on that."""
        self.noted.add(request)

    def drop(self, request: Request) -> None:
        """Cancel a transfer whose handle was dropped, and keep it until nothing of it touches memory any more."""
        request.cancel()
        if not request.drained():
            self.leftovers.append(request)

    def close(self) -> None:
        """Drain what is under way, cancelling what nobody waits for, and close; idempotent."""
        self.stopped.set()
        if self.caretaker is not None and self.caretaker is not current_thread():
            self.caretaker.join()
        for request in [*self.noted, *self.leftovers]:
            request.cancel()
        self._stack.close()

    def _itself(self) -> RemoteAgent:
        with self._lock:
            if self._own is None:
                known = metadata.Metadata(self.name, self.fabric.address, 0, True, {})
                self._own = RemoteAgent(self.fabric, known, self.fabric.address)
            return self._own

    def _table_of(self, remote: RemoteAgent) -> KeyTable:
        return self.memory.keys() if remote is self._own else remote.table()

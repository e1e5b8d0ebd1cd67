"""nixl_agent: NIXL's Python interface over a fabric, method by method; each hands on to AgentCore, Memory and Request.

Any thread, several at once, whatever the synchronization mode is. Names and arguments are those of NIXL 1.5.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from typing import Any

from asyncfabric.integrations.nixl.agent_config import nixl_agent_config
from asyncfabric.integrations.nixl.backends import STORAGE, BackendNames, check_chosen
from asyncfabric.integrations.nixl.blocks import positions_of
from asyncfabric.integrations.nixl.caretaker import start_caretaker
from asyncfabric.integrations.nixl.core import AgentCore
from asyncfabric.integrations.nixl.descriptors import (
    nixlRegDList,
    nixlRemoteDList,
    nixlXferDList,
    registration_list,
    transfer_blocks,
    transfer_list,
)
from asyncfabric.integrations.nixl.errors import (
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotSupportedError,
)
from asyncfabric.integrations.nixl.handles import (
    check_sides,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
    nixlXferTelemetry,
    request_of,
)
from asyncfabric.integrations.nixl.kinds import OPERATIONS, memory_type, nixl_xfer_op_t
from asyncfabric.integrations.nixl.notes import note_bytes
from asyncfabric.integrations.nixl.plan import AnyStep, pick, plan
from asyncfabric.integrations.nixl.refused import NO_LISTENER, RefusedCalls
from asyncfabric.integrations.nixl.remotes import RemoteAgent
from asyncfabric.integrations.nixl.request import Request
from asyncfabric.integrations.nixl.settings import fabric_config, wants_telemetry

logger: logging.Logger = logging.getLogger(__name__)

INIT_AGENT = ("NIXL_INIT_AGENT", "")
Notes = dict[str, list[bytes]]


class nixl_agent(BackendNames, RefusedCalls):
    """An agent: it registers memory, knows others by their metadata, and moves data between its memory and theirs.

    It closes when it is dropped, and with the interpreter, once what is under way has drained.
    """

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        """Open the agent's fabric.

        Raises:
            ValueError: an empty name.
            nixlBackendError: a rail cannot be opened.
            nixlNotFoundError: a backend of the configuration is storage.
            nixlNotSupportedError: the configuration asks for NIXL's listener.
        """
        config = nixl_conf or nixl_agent_config()
        if not agent_name:
            raise ValueError("an agent needs a name, by which others address it")
        if config.enable_listen:
            raise nixlNotSupportedError(NO_LISTENER)
        super().__init__()
        self.name = agent_name
        self.notifs: Notes = {}
        self._telemetry = config.capture_telemetry or wants_telemetry()
        for backend in self.plugin_list if instantiate_all and nixl_conf is None else config.backends:
            if backend in STORAGE or backend in self.plugin_list:
                self.create_backend(backend)
            else:
                logger.warning("skipping backend %r, which is unknown", backend)
        self._core = AgentCore(agent_name, fabric_config(config.fabric), config.engine_factory)
        self._close = weakref.finalize(self, self._core.close)
        if config.enable_pthread:
            start_caretaker(self._core)
        logger.info("agent %r over %s", agent_name, [rail.provider for rail in self._core.fabric.rails])

    # ---- memory ----

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: list[str] | None = None
    ) -> nixlRegDList:
        """Register memory, all of the list or none; the same range again is counted.

        Raises:
            TypeError, KeyError: no descriptors, or no memory type.
            nixlNotFoundError: storage.
            nixlBackendError: it cannot be pinned, or no rail has its device.
        """
        check_chosen(backends or [], self.backends)
        descs = registration_list(reg_list, mem_type)
        self._core.memory.register(descs.blocks)
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: list[str] | None = None) -> None:
        """Deregister memory; returns when nothing can touch it any more and its keys are dead.

        Raises:
            nixlNotFoundError: a range is not registered exactly so.
        """
        check_chosen(backends or [], self.backends)
        self._core.memory.deregister(registration_list(dereg_list, None).blocks)

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        """Raise nixlNotSupportedError: only storage can be queried. ValueError for a backend that the agent has not."""
        registration_list(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(f"Backend '{backend}' not found. Available backends: {list(self.backends)}")
        raise nixlNotSupportedError("query_memory() is for storage backends, which asyncfabric does not offer")

    # ---- descriptors ----

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList:
        """Return a transfer list of tuples (address, length, device), an Nx3 array or tensors."""
        return transfer_list(descs, mem_type)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList:
        """Return a registration list of tuples (address, length, device, text), an Nx3 array or tensors."""
        return registration_list(descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList:
        """Return a list of tuples (address, length, device, agent)."""
        if isinstance(descs, nixlRemoteDList):
            return descs
        if mem_type is None:
            raise TypeError("a remote list needs mem_type: 'DRAM' or 'VRAM'")
        return nixlRemoteDList(memory_type(mem_type), descs)

    def get_serialized_descs(self, descs: Any) -> bytes:
        """Return a descriptor list as bytes; only for bytes of trusted origin, as with NIXL: they are a pickle."""
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """Return a descriptor list from what `get_serialized_descs` made."""
        return pickle.loads(serialized_descs)

    # ---- other agents ----

    def get_agent_metadata(self) -> bytes:
        """Return what others need to reach the agent and all that it has registered."""
        return self._core.metadata()

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: list[str] | None = None
    ) -> bytes:
        """Return these registrations for others and, with inc_conn_info, what they need to reach the agent.

        Raises:
            nixlNotFoundError: a range is not registered exactly so.
        """
        check_chosen(backends or [], self.backends)
        return self._core.metadata(descs.blocks, address=inc_conn_info)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Take the metadata of another agent, again when it has grown, and return its name in bytes, as NIXL does.

        Raises:
            nixlMismatchError: other bytes.
            nixlInvalidParamError: the agent's own.
            nixlNotFoundError: a part without the address of an agent that is not known.
        """
        return self._core.add_remote(metadata).encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Forget an agent and disconnect; transfers to it end, prepared lists of it are dead."""
        self._core.remove_remote(_text(agent))

    def check_remote_metadata(self, agent: str | bytes, descs: nixlXferDList | None = None) -> bool:
        """Return whether an agent is known and, with descriptors, whether they lie in its registrations."""
        return self._core.knows(_text(agent), None if descs is None else descs.blocks)

    def make_connection(self, remote_agent: str | bytes, backends: list[str] | None = None) -> None:
        """Connect now rather than with the first transfer.

        Raises:
            nixlNotFoundError: it is not known.
            nixlRemoteDisconnectError: it cannot be reached.
        """
        check_chosen(backends or [], self.backends)
        self._core.remote(_text(remote_agent)).peer()

    # ---- transfers ----

    def prep_xfer_dlist(
        self, agent_name: str | bytes, xfer_list: Any, mem_type: str | None = None, backends: list[str] | None = None
    ) -> nixl_prepped_dlist_handle:
        """Look descriptors up once, of this side ("NIXL_INIT_AGENT" or "") or of an agent's; Nx5 arrays are strided.

        Raises:
            TypeError, ValueError, KeyError: no descriptors, or no memory type.
            nixlNotFoundError: an unknown agent, or a block outside the registered memory.
        """
        check_chosen(backends or [], self.backends)
        blocks, name = transfer_blocks(xfer_list, mem_type), _text(agent_name)
        if name in INIT_AGENT:
            return nixl_prepped_dlist_handle(self._core, self._core.local_side(blocks), None)
        remote = self._core.remote(name)
        return nixl_prepped_dlist_handle(self._core, self._core.remote_side(remote, blocks), remote)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: bytes = b"",
        backends: list[str] | None = None,
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """Make a transfer of the descriptors at these positions of two prepared lists.

        Raises:
            KeyError: an operation other than "WRITE" and "READ".
            nixlInvalidParamError: bad lists or positions, or lengths that differ.
            nixlNotFoundError: the remote agent was removed.
        """
        if backends:
            check_chosen(backends, self.backends)
        check_sides(local_xfer_side, remote_xfer_side, self._core)
        wanted, remote = OPERATIONS.get(operation), remote_xfer_side._remote
        if wanted is None:
            raise _unknown(operation)
        assert remote is not None, "of the remote side"
        local_alike, remote_alike = local_xfer_side._alike, remote_xfer_side._alike
        if local_alike is not None and remote_alike is not None:
            steps = pick(wanted, local_alike, remote_alike, local_indices, remote_indices)
            if steps is not None:
                return self._made(wanted, remote, steps, len(local_indices), notif_msg)
        first = positions_of("local", local_indices, len(local_xfer_side))
        second = positions_of("remote", remote_indices, len(remote_xfer_side))
        if len(first) != len(second) or not len(first):
            raise nixlInvalidParamError(
                f"{len(first)} local positions and {len(second)} remote ones: give equally many, and at least one"
            )
        steps = plan(wanted, local_xfer_side._side.pick(first), remote_xfer_side._side.pick(second))
        return self._made(wanted, remote, steps, len(first), notif_msg)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes = b"",
        backends: list[str] | None = None,
    ) -> nixl_xfer_handle:
        """Make a transfer of two descriptor lists.

        Raises:
            KeyError: an operation other than "WRITE" and "READ".
            nixlNotFoundError: an unknown agent, no descriptors, or one outside the registered memory.
            nixlInvalidParamError: lists or blocks of other lengths.
        """
        check_chosen(backends or [], self.backends)
        local_blocks, remote_blocks = transfer_list(local_descs, None).blocks, transfer_list(remote_descs, None).blocks
        remote = self._core.remote(_text(remote_agent))
        if not len(local_blocks) and not len(remote_blocks):
            raise nixlNotFoundError("a transfer of no descriptors finds no registered memory")
        if len(local_blocks) != len(remote_blocks):
            raise nixlInvalidParamError(f"{len(local_blocks)} local descriptors, but {len(remote_blocks)} remote ones")
        wanted = OPERATIONS.get(operation)
        if wanted is None:
            raise _unknown(operation)
        steps = plan(wanted, self._core.local_side(local_blocks), self._core.remote_side(remote, remote_blocks))
        return self._made(wanted, remote, steps, len(local_blocks), notif_msg)

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes = b"") -> str:
        """Post a transfer from the calling thread, again once it is done; returns "DONE" or "PROC".

        Raises:
            nixlRepostActiveError: it is under way.
            nixlNotFoundError, nixlRemoteDisconnectError, nixlBackendError: it has failed already.
        """
        return "DONE" if request_of(handle).post(note_bytes(notif_msg) if notif_msg else b"") else "PROC"

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """Return "DONE" or "PROC".

        Raises:
            nixlNotPostedError: it was not posted.
            nixlRemoteDisconnectError, nixlNotFoundError, nixlBackendError: how it failed; NIXL raises these too.
        """
        return "DONE" if request_of(handle).check() else "PROC"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        """Return times, bytes and descriptors of a transfer that is done.

        Raises:
            nixlNoTelemetryError: the configuration does not capture it.
            nixlNotPostedError: it is not done.
        """
        request = request_of(handle)
        if not self._telemetry:
            raise nixlNoTelemetryError(
                f"agent {self.name!r} captures no telemetry: nixl_agent_config(capture_telemetry=True) does, or "
                "NIXL_TELEMETRY_ENABLE=y in the environment"
            )
        return nixlXferTelemetry(*request.times_us, request.total_bytes, request.count)

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        """Return (0, 0, "UNKNOWN"): nothing is estimated."""
        request_of(req_handle)
        return 0, 0, "UNKNOWN"

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        """Return the name of the agent's first backend, which stands for the fabric as all do."""
        request_of(handle)
        return next(iter(self.backends), "UCX")

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Cancel a transfer if it is under way and forget it; then nothing touches its memory any more."""
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        """Forget a prepared list."""
        handle.release()

    # ---- notes ----

    def send_notif(self, remote_agent_name: str | bytes, notif_msg: bytes, backend: str | None = None) -> None:
        """Send a note that belongs to no transfer.

        Raises:
            nixlNotFoundError: the agent is not known.
            nixlRemoteDisconnectError, nixlBackendError: it cannot be reached, or takes none.
        """
        if backend:
            check_chosen([backend], self.backends)
        note, core = note_bytes(notif_msg), self._core
        core.exchange.send(core.remote(_text(remote_agent_name)), note)

    def get_new_notifs(self, backends: list[str] | None = None) -> Notes:
        """Return the notes that have come since the last call, by the name of their sender."""
        if backends:
            check_chosen(backends, self.backends)
        return self._core.exchange.take({})

    def update_notifs(self, backends: list[str] | None = None) -> Notes:
        """Add the notes that have come to `notifs` and return it."""
        check_chosen(backends or [], self.backends)
        return self._core.exchange.take(self.notifs)

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: list[str] | None = None,
        tag_is_prefix: bool = True,
    ) -> bool:
        """Return whether a note with this tag has come from an agent, and take it out of `notifs`."""
        self.update_notifs(backends)
        notes = self.notifs.get(_text(remote_agent_name), [])
        for position, note in enumerate(notes):
            if note.startswith(lookup_tag) if tag_is_prefix else lookup_tag in note:
                del notes[position]
                return True
        return False

    def _made(
        self, operation: nixl_xfer_op_t, remote: RemoteAgent, steps: tuple[AnyStep, ...], count: int, notif_msg: bytes
    ) -> nixl_xfer_handle:
        if remote.removed:
            raise nixlNotFoundError(
                f"agent {remote.name!r} was removed after the list was prepared: add it and prepare the list again"
            )
        note = notif_msg if notif_msg.__class__ is bytes else note_bytes(notif_msg)
        return nixl_xfer_handle(self._core, Request(self._core, operation, remote, steps, count, note))


def _unknown(operation: object) -> KeyError:
    return KeyError(f"operation {operation!r}: expected 'WRITE' or 'READ'")


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name

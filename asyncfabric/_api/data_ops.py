"""The data calls of a fabric, each returning a submitted Transfer: write, scatter, signal, read, send ...

Runs on the event loop's thread, of a fabric of threads on any. This is the hot path: plain attribute reads, one check
per argument, one call into the engine. A transfer is parked before it is submitted, so that an interrupt between two
lines cannot lose its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, SupportsIndex, TypeVar

from asyncfabric._api.checks import checked_imm, checked_index, checked_iterable
from asyncfabric._api.key import RegionKey
from asyncfabric._api.messages import MAX_MESSAGE_BYTES
from asyncfabric._api.peer import Peer, PeerGroup
from asyncfabric._api.peers_known import PeersKnown
from asyncfabric._api.region import AnyRegion, RegionSlice
from asyncfabric._api.streams import first_gpu, stream_device, stream_handle
from asyncfabric._api.transfer import AnyTransfer, TransferT
from asyncfabric._api.watch import WordReaches
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import Completion, EngineStatusError, StatusKind
from asyncfabric._bridge.opened_key import OpenedKey
from asyncfabric.types import MAX_IMM

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

SubmittedT = TypeVar("SubmittedT", bound=AnyTransfer)

_WRITE, _READ = 1, 2
_DRAIN_EVERY = 255
_NOTHING_DONE = Completion(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class ScatterTarget(NamedTuple):
    """One target of `fabric.scatter()`: `length_bytes` from `source_offset` of the source go to `offset` of the key."""

    key: RegionKey
    source_offset: int
    offset: int
    length_bytes: int


class DataOps(Generic[TransferT]):
    """The data calls; a part of Fabric. `_transfer_type` is what they return."""

    _transfer_type: type[TransferT]
    _dispatcher: CompletionDispatcher
    _peers: PeersKnown

    def write(
        self,
        source: AnyRegion | RegionSlice,
        key: RegionKey,
        offset: SupportsIndex,
        imm: SupportsIndex | None = None,
        *,
        after: object = None,
    ) -> TransferT:
        """Write bytes of a local region to `offset` behind a peer's key.

        Args:
            source: what to write: a region or `region[a:b]`; may be empty.
            key: the right to write, from the owner of the memory. Its peer is connected on first use.
            offset: first byte within the key's range.
            imm: counter at the target that gets 1 arrival once all bytes are visible there.
            after: CUDA stream, or its handle: the bytes are read once it is past what it was given before this call. Or
                `word.reaches(n)` of a watch word of this fabric: once that holds n or more, which a kernel may bring
                about without any Python in between.

        Raises:
            TypeError, ValueError: a bad argument: out of bounds, or a key without the right to write.
            StaleKeyError: the key is known to be dead.
            BusyError: too many transfers are in flight; see `wait_writable()`.
            ClosedError: the region is released or the fabric closed.
        """
        region, start, length = _part(source, self._dispatcher)
        opened = self._reach(key, _WRITE, "write")
        if type(offset) is int and 0 <= offset <= opened.length - length:
            to = offset
        else:
            to = _offset("offset", offset, length, opened.length, key)
        if imm is None:
            number = -1
        elif type(imm) is int and 0 <= imm <= MAX_IMM:
            number = imm
        else:
            number = checked_imm(imm)
        dispatcher, make = self._dispatcher, self._transfer_type
        transfer = make(dispatcher, "write", (source, key), length)
        if after is not None:
            place = (region._id, start, length, opened.id, to, number)
            return self._submit_after(self._mark(after, region), transfer, dispatcher.engine.submit_write, *place)
        return self._submit(transfer, dispatcher.engine.submit_write, region._id, start, length, opened.id, to, number)

    def scatter(
        self, source: AnyRegion | RegionSlice, targets: Sequence[ScatterTarget], imm: SupportsIndex | None = None
    ) -> TransferT:
        """Write different bytes of one region to many peers, as one transfer.

        Args:
            source: region or slice that the source offsets count in.
            targets: where to; may be empty.
            imm: counter that gets 1 arrival at each target.

        Raises:
            TypeError, ValueError, StaleKeyError, BusyError, ClosedError: as for `write`; the text names the target.
        """
        region, start, length = _part(source, self._dispatcher)
        number = checked_imm(imm)
        rows, keys, total = [], [], 0
        for position, target in enumerate(checked_iterable("targets", targets, "ScatterTarget")):
            try:
                key, source_offset, offset, size = target
            except (TypeError, ValueError):
                raise TypeError(f"targets[{position}] must be a ScatterTarget, got {target!r}") from None
            opened = self._reach(key, _WRITE, f"targets[{position}]")
            fine = type(size) is type(source_offset) is type(offset) is int and size >= 0
            if not (fine and 0 <= source_offset <= length - size and 0 <= offset <= opened.length - size):
                size = checked_index(f"targets[{position}].length_bytes", size)
                source_offset = _offset(f"targets[{position}].source_offset", source_offset, size, length, source)
                offset = _offset(f"targets[{position}].offset", offset, size, opened.length, key)
            rows.append((opened.id, start + source_offset, offset, size))
            keys.append(key)
            total += size
        dispatcher = self._dispatcher
        transfer = self._transfer_type(dispatcher, f"scatter to {len(rows)} targets", (source, *keys), total)
        if not rows:
            return self._nothing(transfer)
        return self._submit(transfer, dispatcher.engine.submit_scatter, region._id, rows, number)

    def read(self, key: RegionKey, offset: SupportsIndex, destination: AnyRegion | RegionSlice) -> TransferT:
        """Read bytes from `offset` behind a peer's key into a local region.

        Raises:
            TypeError, ValueError, StaleKeyError, BusyError, ClosedError: as for `write`; also ValueError for a key
                without the right to read, and for a destination that was registered from a read-only buffer.

        Awaiting it raises TransferError where no rail to the peer can read (see `can_read` of `fabric.rails`).
        """
        region, start, length = _part(destination, self._dispatcher)
        opened = self._reach(key, _READ, "read")
        if region._readonly:
            raise ValueError(f"cannot read into {destination!r}: it was registered from a read-only buffer")
        if type(offset) is int and 0 <= offset <= opened.length - length:
            to = offset
        else:
            to = _offset("offset", offset, length, opened.length, key)
        transfer = self._transfer_type(self._dispatcher, "read", (key, destination), length)
        return self._submit(transfer, self._dispatcher.engine.submit_read, region._id, start, length, opened.id, to)

    def signal(self, peer: Peer, imm: SupportsIndex) -> TransferT:
        """Count 1 arrival at a peer, without data.

        Raises:
            TypeError, ValueError: not a Peer of this fabric, or a bad imm.
            BusyError, ClosedError: as for `write`.
        """
        number = imm if type(imm) is int and 0 <= imm <= MAX_IMM else checked_index("imm", imm, 0, MAX_IMM)
        transfer = self._transfer_type(self._dispatcher, "signal", peer, 0)
        return self._submit(transfer, self._dispatcher.engine.submit_signal, (self._own(peer, "signal"),), number)

    def barrier(self, group: PeerGroup, imm: SupportsIndex) -> TransferT:
        """Signal each member of a group, as one transfer; waiting for the others is the counter's part.

        Raises:
            TypeError, ValueError, BusyError, ClosedError: as for `signal`.
        """
        if not isinstance(group, PeerGroup):
            raise TypeError(f"barrier takes a PeerGroup, got {type(group).__name__}")
        number = checked_index("imm", imm, 0, MAX_IMM)
        ids = tuple([self._own(peer, "barrier") for peer in group])
        transfer = self._transfer_type(self._dispatcher, f"barrier of {len(ids)} peers", group, 0)
        if not ids:
            return self._nothing(transfer)
        return self._submit(transfer, self._dispatcher.engine.submit_signal, ids, number)

    def send(self, peer: Peer, payload: bytes | bytearray | memoryview) -> TransferT:
        """Send a small message, received by `messages()` at the peer. The payload is copied.

        Messages of one pair of fabrics may overtake each other. At most 8,192 bytes; bulk data goes by `write`.

        Raises:
            TypeError, ValueError: not a Peer of this fabric, or a bad payload.
            BusyError, ClosedError: as for `write`.
        """
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise TypeError(f"payload must be bytes, got {type(payload).__name__}")
        data = bytes(payload)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"payload has {len(data)} bytes, a message carries at most {MAX_MESSAGE_BYTES}")
        transfer = self._transfer_type(self._dispatcher, "send", peer, len(data))
        return self._submit(transfer, self._dispatcher.engine.submit_send, self._own(peer, "send"), data)

    def _post(self, messages: AnyTransfer, peer: Peer, payload: bytes) -> None:
        """Send a message as `send` does, without a transfer of its own: `messages` gets the completions of many."""
        self._submit(messages, self._dispatcher.engine.submit_send, self._own(peer, "send"), payload)

    def _submit(self, transfer: SubmittedT, submit: Callable[..., int], *arguments: Any) -> SubmittedT:
        dispatcher = self._dispatcher
        if dispatcher.closing:
            raise faults.closed("the fabric")
        cookie = dispatcher.next_cookie()
        dispatcher.parked[cookie] = transfer
        try:
            transfer.op = submit(cookie, *arguments)
        except EngineStatusError as error:
            self._submit_again(error, cookie, transfer, submit, arguments)
        except (TypeError, ValueError, OverflowError):
            dispatcher.parked.pop(cookie, None)  # another thread may have closed the fabric meanwhile
            raise
        if not cookie & _DRAIN_EVERY:
            dispatcher.drain()  # whoever submits without ever awaiting must not fill the ring
        return transfer

    def _submit_after(self, mark: int, transfer: SubmittedT, submit: Callable[..., int], *arguments: Any) -> SubmittedT:
        """Submit what names a mark; refused, nobody will name it again."""
        try:
            return self._submit(transfer, submit, *arguments, mark)
        except BaseException:
            self._dispatcher.engine.drop_mark(mark)
            raise

    def _submit_again(
        self,
        refusal: EngineStatusError,
        cookie: int,
        transfer: SubmittedT,
        submit: Callable[..., int],
        arguments: tuple[Any, ...],
    ) -> None:
        """Submit once more if completions that nobody took were in the way; otherwise raise the refusal."""
        dispatcher = self._dispatcher
        if refusal.status_kind == StatusKind.BUSY:
            dispatcher.drain()
            try:
                transfer.op = submit(cookie, *arguments)
            except EngineStatusError as error:
                refusal = error
            else:
                return
        dispatcher.parked.pop(cookie, None)
        raise faults.refused(refusal, faults.FailedCall(transfer.describe())) from None

    def _mark(self, after: object, region: AnyRegion) -> int:
        engine = self._dispatcher.engine
        try:
            if isinstance(after, WordReaches):
                return after.mark(self._dispatcher)
            handle = stream_handle(after)
            otherwise = region._device if region._device >= 0 else first_gpu(engine.rails())
            return engine.mark_stream(handle, stream_device(after, otherwise))
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall("a write after a stream or a watch word")) from None

    def _nothing(self, transfer: SubmittedT) -> SubmittedT:
        """Return a transfer of nothing, which has ended at once."""
        if self._dispatcher.closing:
            raise faults.closed("the fabric")
        transfer.completion = _NOTHING_DONE
        return transfer

    def _reach(self, key: RegionKey, right: int, what: str) -> OpenedKey:
        if key.__class__ is not RegionKey:
            kind = type(key).__name__
            raise TypeError(f"{what}: key must be a RegionKey, got {kind}; RegionKey.from_bytes() parses bytes")
        opened = key.opened
        if opened is None or opened.dispatcher is not self._dispatcher:
            if self._dispatcher.closing:
                raise faults.closed("the fabric")
            opened = key.open_for(self._dispatcher)
        if not opened.access & right:
            verb = "write" if right == _WRITE else "read"
            raise ValueError(f"{what}: {key!r} carries no right to {verb}; ask for region.key(access='{verb}')")
        if self._peers.mixed:
            self._peers.check_connected(self._dispatcher.engine.peer_of_key(opened.id), what)
        return opened

    def _own(self, peer: Peer, what: str = "") -> int:
        thread = self._dispatcher.thread
        if thread and get_ident() != thread:
            raise faults.another_loop()
        if peer.__class__ is not Peer:
            raise TypeError(f"peer must be a Peer from `await fabric.connect(...)`, got {type(peer).__name__}")
        if peer._dispatcher is not self._dispatcher:
            raise ValueError(f"{peer!r} belongs to another fabric of this process; connect from this one")
        if what and self._peers.mixed:
            self._peers.check_named(peer, what)
        return peer._id


def _part(source: AnyRegion | RegionSlice, dispatcher: CompletionDispatcher) -> tuple[AnyRegion, int, int]:
    """Return (region, offset, length) of what the user names; raises for anything else and for released regions."""
    thread = dispatcher.thread
    if thread and get_ident() != thread:  # written out: a call would cost more than the look
        raise faults.another_loop()
    if source.__class__ is RegionSlice:
        region, start, length = source._region, source._offset, source._length
    elif isinstance(source, AnyRegion):
        region, start, length = source, 0, source._length
    else:
        raise TypeError(f"expected a Region or region[a:b], got {type(source).__name__}; register the memory first")
    if region._released:
        raise faults.closed(repr(region))
    if region._dispatcher is not dispatcher:
        raise ValueError(f"{region!r} belongs to another fabric of this process; register the memory with this one")
    return region, start, length


def _offset(name: str, offset: object, length: int, bound: int, where: object) -> int:
    number = checked_index(name, offset)
    if number + length > bound:
        end = number + length
        raise ValueError(f"{name} {number} + {length} bytes = {end} is beyond the {bound} bytes of {where!r}")
    return number

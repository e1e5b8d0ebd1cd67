"""Region: registered memory; RegionSlice: a part of it, the source of writes and the destination of reads.

Runs on the event loop's thread, of a fabric of threads on any. A region of host memory is itself a buffer, so
`memoryview(region)`, `numpy.asarray(region)` and `torch.frombuffer(region, ...)` work without a copy.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from asyncfabric._api.checks import access_name, checked_access, checked_slice
from asyncfabric._api.key import RegionKey
from asyncfabric._api.region_end import release_region, revoke_region
from asyncfabric._api.region_record import RegionRecord
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric.types import AccessMode

if TYPE_CHECKING:
    from asyncfabric._api.tensor_view import DType, Tensor
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

HOST = -1


class AnyRegion:
    """Memory that the engine may move, made by `fabric.register()` or `fabric.allocate()`; of any kind of fabric.

    Slicing `region[a:b]` in bytes gives a RegionSlice; nothing is clamped. The fabric keeps the buffer alive and
    exported until `release()` has returned or the fabric is closed, also when the Region is dropped before: then the
    memory stays registered, and Python warns with ResourceWarning.

    `memoryview(region)` of a registered buffer must not be used after that. What `region.memory` and `region.tensor()`
    returned keeps such a buffer exported until it is dropped itself.
    """

    _dispatcher: CompletionDispatcher
    _id: int
    _base: int
    _length: int
    _device: int
    _access: int
    _readonly: bool
    _record: RegionRecord
    _released: bool = True  # of an object that make_region did not fill

    def __init__(self) -> None:
        """Not for users."""
        raise TypeError("a Region is made by `fabric.register(buffer)` or `fabric.allocate(length_bytes)`")

    @property
    def id(self) -> int:
        """Number of the region in its fabric, as in error texts."""
        return self._id

    @property
    def length(self) -> int:
        """Length in bytes; also `len(region)`."""
        return self._length

    @property
    def device(self) -> str:
        """Where the memory is: `cpu` or `cuda:N`."""
        return "cpu" if self._device == HOST else f"cuda:{self._device}"

    @property
    def access(self) -> AccessMode:
        """What peers with a key may be permitted to do."""
        mode: AccessMode = access_name(self._access)
        return mode

    @property
    def released(self) -> bool:
        """Whether `release()` was called."""
        return self._released

    @property
    def memory(self) -> memoryview:
        """The bytes, read-only when the registered buffer is.

        Raises:
            ValueError: memory of a GPU.
            ClosedError: a registered buffer that was given back, by `release()` or with the fabric.
        """
        if self._device != HOST:
            raise ValueError(f"{self!r} is memory of {self.device}; the CPU cannot look at it")
        record = self._record
        if not record.of_caller:
            return memoryview(self)
        if record.keepalive is None:
            raise faults.closed(repr(self))
        view = memoryview(_exporter(self._length).over(self, record.keepalive))
        return view.toreadonly() if self._readonly else view

    def tensor(self, dtype: DType, shape: tuple[int, ...] | list[int] | int | None = None) -> Tensor:
        """Return a tensor over the first bytes of the region, without a copy; `shape` None takes all of them.

        Do not use it after the region was released.
        """
        return self[:].tensor(dtype, shape)

    def key(self, access: AccessMode | None = None, *, strict: bool = False) -> RegionKey:
        """Return a key to the whole region for peers; None gives the access that the region was registered with.

        See `RegionSlice.key` for `strict`.

        Raises:
            ValueError: the region was registered with less, or for local use only.
            BusyError: the region is being revoked.
            ClosedError: it was released.
        """
        return self[:].key(access, strict=strict)

    if TYPE_CHECKING:

        def __buffer__(self, flags: int, /) -> memoryview:
            """Show type checkers that a region is a buffer; ctypes exports it."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> RegionSlice:
        return RegionSlice(self, *checked_slice("region", part, self._length))

    def __repr__(self) -> str:
        state = ", released" if self._released else ""
        return f"<Region {faults.short_id(self._id)}: {self._length} bytes on {self.device}{state}>"

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __del__(self) -> None:
        if self._released or self._dispatcher.closing:
            return
        warnings.warn(
            f"{self!r} was dropped without `region.release()`; its memory stays registered until the fabric closes",
            ResourceWarning,
            stacklevel=2,
            source=self,
        )

    def _check_open(self) -> None:
        self._dispatcher.check_thread()
        if self._released or self._dispatcher.closing:
            raise faults.closed(repr(self))


class Region(AnyRegion):
    """Memory that the engine may move, made by `fabric.register()` or `fabric.allocate()`.

    Slicing `region[a:b]` in bytes gives a RegionSlice; nothing is clamped. The fabric keeps the buffer alive and
    exported until `release()` has returned or the fabric is closed, also when the Region is dropped before: then the
    memory stays registered, and Python warns with ResourceWarning.

    `memoryview(region)` of a registered buffer must not be used after that. What `region.memory` and `region.tensor()`
    returned keeps such a buffer exported until it is dropped itself.
    """

    async def revoke(self) -> None:
        """Kill every key handed out so far; the memory stays registered, and `key()` makes keys of a new generation.

        Returns when no write under an old key can land any more.

        Cancellation: the revocation goes on; only the wait for it ends.
        """
        await revoke_region(self)

    async def release(self) -> None:
        """Deregister the memory; returns when nothing can touch it any more. Idempotent.

        A registered buffer is exported no longer then: a bytearray can be resized.

        Raises:
            TransferError: a device may still touch it, so the memory stays pinned until the process ends.

        Cancellation: shielded until nothing can touch the memory, bounded by `config.drain_deadline`; then it goes on.
        """
        await release_region(self)


class RegionSlice:
    """Bytes [offset, offset + length) of a region; made by `region[a:b]`."""

    __slots__ = ("_length", "_offset", "_region")

    def __init__(self, region: AnyRegion, offset: int, length: int) -> None:
        """Not for users: slice a region."""
        self._region = region
        self._offset = offset
        self._length = length

    @property
    def region(self) -> AnyRegion:
        """The region that this is a part of."""
        return self._region

    @property
    def offset(self) -> int:
        """First byte within the region."""
        return self._offset

    @property
    def length(self) -> int:
        """Length in bytes; also `len()`."""
        return self._length

    @property
    def memory(self) -> memoryview:
        """The bytes, read-only when the registered buffer is."""
        return self._region.memory[self._offset : self._offset + self._length]

    def tensor(self, dtype: DType, shape: tuple[int, ...] | list[int] | int | None = None) -> Tensor:
        """Return a tensor over the first bytes of the slice, without a copy; `shape` None takes all of them."""
        from asyncfabric._api.tensor_view import tensor_over

        return tensor_over(self._region, self._offset, self._length, dtype, shape)

    def key(self, access: AccessMode | None = None, *, strict: bool = False) -> RegionKey:
        """Return a key that reaches these bytes only; its offset 0 is the first of them.

        The engine of the key's user holds it to these bytes, so a peer that leaves its engine's checks out reaches the
        whole region. With `strict` the bytes are also checked where they land, at a cost: `tcp`, `efa` and `verbs` make
        a registration for each strict range, and on `local` this engine copies the bytes, twice instead of once.
        The registration ends with `revoke()` and `release()`. The explanation of trust has a table of it by rail.

        Raises:
            ValueError: the region was registered with less access, or the slice is empty.
            BusyError: the region is being revoked.
            TransferError: `strict`, and no rail can hold a peer to a range of this memory (that of a GPU on one host).
            ClosedError: the region was released.
        """
        region = self._region
        region._check_open()
        bits = region._access if access is None else checked_access(access)
        if bits & ~region._access:
            raise ValueError(f"a key with access {access!r}, but the region was registered with {region.access!r}")
        if bits == 0:
            raise ValueError("a key needs the right to write or to read; the region was registered with access='local'")
        if self._length == 0:
            raise ValueError(f"a key to an empty slice of {region!r} would reach nothing")
        engine = region._dispatcher.engine
        try:
            data = engine.region_key(region._id, bits, self._offset, self._length, strict)
            generation, incarnation = engine.region_info(region._id).generation, engine.incarnation()
        except EngineStatusError as error:
            raise faults.refused(error, faults.FailedCall(f"making a key of {region!r}")) from None
        return RegionKey(incarnation, region._id, generation, self._length, bits, data)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> RegionSlice:
        offset, length = checked_slice("region slice", part, self._length)
        return RegionSlice(self._region, self._offset + offset, length)

    def __repr__(self) -> str:
        end = self._offset + self._length
        return f"<RegionSlice [{self._offset}:{end}] of region {faults.short_id(self._region._id)}>"


class _Byte(ctypes.Union):
    """One byte. Arrays of unions export format "B"; arrays of c_ubyte export "<B", which memoryview cannot index."""

    _fields_ = (("value", ctypes.c_ubyte),)


@lru_cache(maxsize=256)
def _exporting_region(kind: type[AnyRegion], length: int) -> Any:
    """Return a class of regions whose instances export `length` bytes; before Python 3.12 only C types can export."""
    return type(kind.__name__, (kind, _Byte * length), {"__module__": kind.__module__})


class _Exporter:
    """What views of a registered buffer are made of; it keeps the buffer exported as long as there is a view."""

    region: AnyRegion
    keepalive: object

    @classmethod
    def over(cls, region: AnyRegion, keepalive: object) -> _Exporter:
        """Return an exporter of the bytes of a region."""
        exporter: _Exporter = cls.from_address(region._base)  # type: ignore[attr-defined]
        exporter.region = region
        exporter.keepalive = keepalive
        return exporter

    if TYPE_CHECKING:

        def __buffer__(self, flags: int, /) -> memoryview:
            """Show type checkers that this is a buffer; ctypes exports it."""


@lru_cache(maxsize=256)
def _exporter(length: int) -> type[_Exporter]:
    return type("Exporter", (_Exporter, _Byte * length), {})


RegionT = TypeVar("RegionT", bound=AnyRegion)


def make_region(
    kind: type[RegionT],
    dispatcher: CompletionDispatcher,
    region_id: int,
    base: int,
    length: int,
    device: int,
    access: int,
    *,
    of_caller: bool,
    readonly: bool = False,
    keepalive: object = None,
    cost_s: float = 0.0,
) -> RegionT:
    """Return the Region object of a registered region; a buffer itself if the CPU may write to it."""
    region: RegionT
    if device == HOST and not readonly:
        exported: Any = kind  # type checkers take a class that defines __hash__ for one that has none itself
        region = _exporting_region(exported, length).from_address(base)
    else:
        region = kind.__new__(kind)
    region._dispatcher = dispatcher
    region._id = region_id
    region._base = base
    region._length = length
    region._device = device
    region._access = access
    region._readonly = readonly
    record = RegionRecord(region_id, length, region.device, region.access, of_caller, keepalive, cost_s)
    dispatcher.regions[region_id] = region._record = record
    region._released = False
    return region

"""Registrations of one agent: memory that callers name by raw addresses, registered with its fabric and counted.

Any thread. The same range registered twice is one region with a count of two; ranges that overlap are regions of their
own, so that deregistering one kills its keys and no others.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock

from asyncfabric import RegionKey, blocking
from asyncfabric.errors import FabricError
from asyncfabric.integrations.nixl import metadata
from asyncfabric.integrations.nixl.blocks import Blocks
from asyncfabric.integrations.nixl.errors import nixlNotFoundError, translated
from asyncfabric.integrations.nixl.kinds import DRAM, VRAM
from asyncfabric.integrations.nixl.ranges import Place, RangeTable

_CUDA = 2  # kDLCUDA


class DeviceBytes:
    """Raw memory of a GPU, as the objects of other libraries show theirs. Its owner keeps it alive, as with NIXL."""

    def __init__(self, address: int, length: int, device: int) -> None:
        self._device = device
        self.__cuda_array_interface__: dict[str, object] = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._device


@dataclass(slots=True)
class _Registration:
    region: blocking.Region
    packed: bytes
    count: int = 1


class Memory:
    """What an agent has registered."""

    def __init__(self, fabric: blocking.Fabric) -> None:
        self._fabric = fabric
        self._lock = Lock()
        self._registrations: dict[Place, _Registration] = {}
        self._table: RangeTable[blocking.Region] | None = None
        self._keys: RangeTable[RegionKey] | None = None
        self.serial: int = 0

    def register(self, blocks: Blocks) -> None:
        """Register each block, or count it once more; all of them or none. Empty blocks count for nothing.

        Raises:
            nixlNotFoundError: memory of files, objects or block devices.
            nixlBackendError: it cannot be pinned, or no rail has its device.
        """
        done: list[Place] = []
        try:
            for place in _places(blocks):
                with self._lock:
                    known = self._registrations.get(place)
                    if known is not None:
                        known.count += 1
                    else:
                        self._registrations[place] = self._register(place)
                        self._changed()
                done.append(place)
        except BaseException:
            self._deregister(Counter(done))
            raise

    def deregister(self, blocks: Blocks) -> None:
        """Count each block down; at zero its keys are dead, and it returns when nothing can touch the memory any more.

        Raises:
            nixlNotFoundError: a range that is not registered, exactly so; then nothing is deregistered.
            nixlBackendError: a device may still touch memory; it stays pinned.
        """
        wanted = Counter(_places(blocks))
        with self._lock:
            for place, count in wanted.items():
                known = self._registrations.get(place)
                if known is None or known.count < count:
                    raise nixlNotFoundError(
                        f"{place.length} bytes at {place.start:#x} in {place.memory.name} are registered "
                        f"{known.count if known else 0} times, and deregistered {count} times"
                    )
        self._deregister(wanted)

    def table(self) -> RangeTable[blocking.Region]:
        """Return the regions by address."""
        with self._lock:
            if self._table is None:
                self._table = RangeTable((place, one.region) for place, one in self._registrations.items())
            return self._table

    def keys(self) -> RangeTable[RegionKey]:
        """Return keys by address, as a remote agent has them: for transfers of an agent to itself."""
        with self._lock:
            if self._keys is None:
                self._keys = RangeTable((place, one.region.key()) for place, one in self._registrations.items())
            return self._keys

    def entries(self, blocks: Blocks | None = None) -> tuple[int, list[bytes]]:
        """Return the serial and the registrations as bytes: all, or those of exactly these ranges.

        Raises:
            nixlNotFoundError: one of these ranges is not registered.
        """
        with self._lock:
            if blocks is None:
                return self.serial, [one.packed for one in self._registrations.values()]
            found = []
            for place in _places(blocks):
                if place not in self._registrations:
                    raise nixlNotFoundError(
                        f"{place.length} bytes at {place.start:#x} in {place.memory.name} are not registered"
                    )
                found.append(self._registrations[place].packed)
            return self.serial, found

    def __len__(self) -> int:
        return len(self._registrations)

    def _register(self, place: Place) -> _Registration:
        what = f"registering {place.length} bytes at {place.start:#x} in {place.memory.name}"
        try:
            region = self._fabric.register(_buffer(place))
            return _Registration(region, metadata.entry(place, region.key()))
        except (FabricError, TypeError, ValueError) as error:
            raise translated(error, what) from error

    def _deregister(self, wanted: Counter[Place]) -> None:
        ended: list[tuple[Place, blocking.Region]] = []
        with self._lock:
            for place, count in wanted.items():
                known = self._registrations.get(place)
                if known is None:
                    continue
                known.count -= count
                if known.count <= 0:
                    del self._registrations[place]
                    self._changed()
                    ended.append((place, known.region))
        failure: Exception | None = None
        for place, region in ended:  # without the lock: releasing may wait for a peer, others register meanwhile
            try:
                region.release()
            except FabricError as error:
                failure = translated(error, f"deregistering {place.length} bytes at {place.start:#x}")
        if failure is not None:
            raise failure

    def _changed(self) -> None:
        self.serial += 1
        self._table = self._keys = None


def _places(blocks: Blocks) -> Iterable[Place]:
    if blocks.memory not in (DRAM, VRAM):
        raise nixlNotFoundError(
            f"{blocks.memory.name} is storage: asyncfabric moves DRAM and VRAM; use NIXL itself for files and objects"
        )
    columns = zip(blocks.devices.tolist(), blocks.addresses.tolist(), blocks.lengths.tolist(), strict=True)
    return [Place(blocks.memory, *row) for row in columns if row[2]]


def _buffer(place: Place) -> object:
    if place.memory == VRAM:
        return DeviceBytes(place.start, place.length, place.device)
    return (ctypes.c_ubyte * place.length).from_address(place.start)

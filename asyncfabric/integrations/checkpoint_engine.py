"""The P2P store of checkpoint_engine: its parameter servers read each other's checkpoints over asyncfabric.

    from asyncfabric.integrations import checkpoint_engine as fabric_store

    fabric_store.install()  # before a ParameterServer is made, in each process; uninstall() puts back what was there

Written for checkpoint-engine 0.4.2. Any thread. `host:port` of a store leads to its offer: the fabric and a key for
each registered tensor, so that raw addresses of the caller become keys here.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import checkpoint_engine
import checkpoint_engine.p2p_store
import checkpoint_engine.ps
import msgspec
import torch
from checkpoint_engine.device_utils import get_ip

import asyncfabric as af
from asyncfabric.blocking import Region, Transfer, wait_all
from asyncfabric.integrations.offers import OfferServer, fetch_offer, read_offer
from asyncfabric.integrations.process_fabric import process_fabric
from asyncfabric.integrations.reading import give_up, submit_read

DEVICE = "asyncfabric"
MEETING_S = 10.0
"""How long the store of another rank may take to answer."""
_MODULES = (checkpoint_engine, checkpoint_engine.p2p_store, checkpoint_engine.ps)
_originals: list[Any] = []


class _Row(msgspec.Struct, array_like=True, frozen=True):
    """A registered tensor of an offer."""

    base: int
    length: int
    key: bytes


class _Offer(msgspec.Struct, array_like=True, frozen=True):
    """What a store offers: its fabric, and its tensors by rising address."""

    address: bytes
    rows: list[_Row]


class _Named(NamedTuple):
    base: int
    length: int
    region: Region


def install() -> None:
    """Have checkpoint_engine make this store where it makes its own; again does nothing."""
    if not _originals:
        _originals.extend(module.P2PStore for module in _MODULES)
        for module in _MODULES:
            module.P2PStore = P2PStore


def uninstall() -> None:
    """Put the store of checkpoint_engine back; stores that were made stay as they are."""
    while _originals:
        _MODULES[len(_originals) - 1].P2PStore = _originals.pop()


class P2PStore:
    """What checkpoint_engine needs of a store: `addr`, `device` and three calls."""

    def __init__(self, device_manager: Any = None) -> None:
        """Open the fabric of the process and a port that leads to it.

        Args:
            device_manager: of checkpoint_engine; it names the RDMA device that balances the readers. None, or one that
                finds no device, gives each host one.

        Raises:
            DeviceError: no rail can be opened.
        """
        self.rank: int = int(os.environ.get("RANK", "0"))
        self.device: str = _device_of(device_manager, self.rank)
        self.ip: str = get_ip()
        self.named_tensors: dict[str, torch.Tensor] = {}
        self._fabric = process_fabric()
        self._lock = Lock()
        self._named: dict[str, _Named] = {}
        self._sorted: list[_Named] = []
        self._peers: dict[str, list[_Row]] = {}
        self._offers = OfferServer(self.ip, 0, self._offer)

    @property
    def addr(self) -> str:
        """`host:port` of this store, for the metadata of checkpoint_engine."""
        return f"{self.ip}:{self._offers.port}"

    def register_named_tensors(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Register tensors: other ranks may read them, and this one may read into them.

        Raises:
            ValueError: a name that is registered already, or a tensor that is empty or not contiguous; then none is.
            DeviceError: no memory could be pinned, or no rail carries memory of that device.
        """
        with self._lock:
            known = sorted(self._named.keys() & named_tensors.keys())
            if known:
                raise ValueError(f"registered already: {', '.join(known)}; unregister them first")
            fresh: dict[str, _Named] = {}
            try:
                for name, tensor in named_tensors.items():
                    region = self._fabric.register(tensor, access="read")
                    fresh[name] = _Named(tensor.data_ptr(), tensor.nbytes, region)
            except BaseException:
                for named in fresh.values():
                    named.region.release()
                raise
            self._named.update(fresh)
            self.named_tensors.update(named_tensors)
            self._sort()

    def unregister_named_tensors(self, names: list[str]) -> int:
        """Release tensors, and return how many; returns when no rank reads from them any more.

        Raises:
            KeyError: a name that is not registered; then none is released.
            TransferError: a device may still touch the memory, so it stays pinned until the process ends.
        """
        with self._lock:
            unknown = [name for name in names if name not in self._named]
            if unknown:
                raise KeyError(f"not registered: {', '.join(unknown)}")
            regions = [self._named.pop(name).region for name in names]
            for name in names:
                del self.named_tensors[name]
            self._sort()
        for region in regions:  # not under the lock: ranks that read from them now may take a while to end
            region.release()
        return len(names)

    def batch_transfer_sync_read(
        self, target_hostname: str, buf_ptrs: list[int], remote_ptrs: list[int], lens: list[int]
    ) -> None:
        """Read ranges of another rank's tensors into tensors of this one; returns when all bytes are there.

        Args:
            target_hostname: `addr` of the other store.
            buf_ptrs: first addresses here.
            remote_ptrs: first addresses there.
            lens: bytes of each range.

        Raises:
            ValueError: lists of different lengths, or a range outside of what is registered on its side.
            PeerError: the rank does not answer, is out of reach of the rails, or died.
            TransferError: a read failed; nothing writes into the buffers any more.
        """
        if not len(buf_ptrs) == len(remote_ptrs) == len(lens):
            raise ValueError(f"{len(buf_ptrs)} buffers, {len(remote_ptrs)} remote addresses and {len(lens)} lengths")
        parts = [self._part(base, length) for base, length in zip(buf_ptrs, lens, strict=True)]
        fresh = target_hostname not in self._peers
        try:
            self._read(target_hostname, parts, remote_ptrs, lens)
        except (af.StaleKeyError, af.PeerError, ValueError):
            # The rank may have registered other tensors, or restarted, since it was asked: reads can be repeated.
            self._peers.pop(target_hostname, None)
            if fresh:
                raise
            self._read(target_hostname, parts, remote_ptrs, lens)

    def close(self) -> None:
        """Stop serving and release all tensors; checkpoint_engine never calls it, the end of the process does as much.

        Raises:
            TransferError: as `unregister_named_tensors`.
        """
        self._offers.close()
        self.unregister_named_tensors(list(self._named))

    def _read(
        self, place: str, parts: Sequence[af.RegionSlice], remote_ptrs: Sequence[int], lens: Sequence[int]
    ) -> None:
        rows = self._peers.get(place)
        if rows is None:
            rows = self._peers[place] = self._meet(place)
        bases = [row.base for row in rows]
        keys: dict[int, af.RegionKey] = {}
        transfers: list[Transfer] = []
        try:
            for part, pointer, length in zip(parts, remote_ptrs, lens, strict=True):
                number = bisect_right(bases, pointer) - 1
                if number < 0 or pointer + length > bases[number] + rows[number].length:
                    raise ValueError(f"{length} bytes at {pointer:#x} are in no tensor that the store at {place} has")
                if number not in keys:
                    keys[number] = af.RegionKey.from_bytes(rows[number].key)
                transfers.append(submit_read(self._fabric, keys[number], pointer - bases[number], part))
        except BaseException:
            give_up(transfers)
            raise
        wait_all(transfers)

    def _meet(self, place: str) -> list[_Row]:
        offer = read_offer(fetch_offer(place, MEETING_S), _Offer)
        self._fabric.connect(offer.address)
        return offer.rows

    def _part(self, pointer: int, length: int) -> af.RegionSlice:
        with self._lock:
            number = bisect_right(self._sorted, pointer, key=lambda named: named.base) - 1
            named = self._sorted[number] if number >= 0 else None
        if named is None or pointer + length > named.base + named.length:
            raise ValueError(f"{length} bytes at {pointer:#x} are in no tensor that this store has registered")
        return named.region[pointer - named.base : pointer - named.base + length]

    def _offer(self) -> bytes:
        with self._lock:
            rows = [_Row(named.base, named.length, bytes(named.region.key("read"))) for named in self._sorted]
        return msgspec.msgpack.encode(_Offer(bytes(self._fabric.address), rows))

    def _sort(self) -> None:
        self._sorted = sorted(self._named.values(), key=lambda named: named.base)


def _device_of(device_manager: Any, rank: int) -> str:
    """Return the RDMA device that checkpoint_engine would take; with none, readers of a host count as one device."""
    if device_manager is None:
        return DEVICE
    try:
        return str(device_manager.rdma_device(rank % device_manager.device_module.device_count()))
    except (OSError, RuntimeError, TypeError, ValueError, AssertionError):
        return DEVICE

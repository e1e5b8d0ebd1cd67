"""A transfer channel of LMCache: reads objects out of the host memory (L1) of another LMCache server.

    from asyncfabric.integrations import lmcache as fabric_channel

    fabric_channel.register()  # then the name "asyncfabric" chooses it, where it was "nixl"

Written for lmcache 0.5.6. Any thread. Each object is a read of its own, so the result names those that failed. A peer
that restarted is met again by the next read.
"""

from __future__ import annotations

import ctypes
import logging
from threading import Lock
from typing import Any, NamedTuple

import msgspec
from lmcache.v1.distributed.transfer_channel.factory import register_transfer_channel_factory

import asyncfabric as af
from asyncfabric.blocking import Fabric, Region, Transfer
from asyncfabric.integrations.lmcache_interface import (
    L1MemoryDesc,
    TransferChannelAddress,
    TransferChannelClient,
    TransferChannelContext,
    TransferChannelReadResult,
    TransferChannelServer,
)
from asyncfabric.integrations.offers import OfferServer, fetch_offer, parse_place, read_offer
from asyncfabric.integrations.process_fabric import process_fabric
from asyncfabric.integrations.reading import give_up, submit_read

NAME = "asyncfabric"
MEETING_S = 10.0
"""How long a peer may take to answer for the first time."""

_log = logging.getLogger(__name__)


class _ServerOffer(msgspec.Struct, array_like=True, frozen=True):
    """What a server offers: its fabric, a key to read all of its memory, and the bytes of a page of it."""

    address: bytes
    key: bytes
    align: int


class _Peer(NamedTuple):
    key: af.RegionKey
    align: int


def register(name: str = NAME) -> None:
    """Register the channel with LMCache under a name; again with the same name does nothing.

    Raises:
        ValueError: the name belongs to another channel.
    """
    from lmcache.v1.distributed.transfer_channel import factory

    if factory._TRANSFER_CHANNEL_FACTORY_REGISTRY.get(name) is not FabricChannel:
        register_transfer_channel_factory(name, FabricChannel)


class FabricClient(TransferChannelClient):
    """Reads from one peer; made by `FabricChannel.get_transfer_channel_client`."""

    def __init__(self, fabric: Fabric, region: Region, align: int, peer_url: str) -> None:
        """Meet the peer.

        Raises:
            ValueError: not `host:port`.
            PeerError: it does not answer, or is out of reach of the rails.
        """
        self._fabric = fabric
        self._region = region
        self._align = align
        self._peer_url = peer_url
        self._lock = Lock()
        self._tasks: dict[int, list[Transfer]] = {}
        self._lost: dict[int, int] = {}
        self._next = 0
        self._peer: _Peer | None = self._meet()

    def submit_read(
        self, local_addresses: list[TransferChannelAddress], remote_addresses: list[TransferChannelAddress]
    ) -> int:
        """Begin to read objects of the peer into objects of this process, and return the number of the task.

        A peer that cannot be reached fails the objects, not the call.

        Raises:
            ValueError: lists of different lengths, objects of different numbers of pages, not on a page, or outside of
                the memory.
        """
        if len(local_addresses) != len(remote_addresses):
            raise ValueError(f"{len(local_addresses)} local addresses and {len(remote_addresses)} remote ones")
        parts = [
            self._part(number, local, remote)
            for number, (local, remote) in enumerate(zip(local_addresses, remote_addresses, strict=True))
        ]
        transfers: list[Transfer] = []
        try:
            peer = self._peer or self._meet()
            for local, remote, length in parts:
                if remote + length > peer.key.length:
                    raise ValueError(f"byte {remote + length} is outside of the {peer.key.length} of {self._peer_url}")
                destination = self._region[local : local + length]
                transfers.append(submit_read(self._fabric, peer.key, remote, destination))
            self._peer = peer
        except (af.PeerError, af.StaleKeyError) as error:
            self._forget(error)
        except BaseException:
            give_up(transfers)
            raise
        with self._lock:
            task, self._next = self._next, self._next + 1
            self._tasks[task] = transfers
            self._lost[task] = len(parts) - len(transfers)
        return task

    def query_read_status(self, task_id: int) -> TransferChannelReadResult:
        """Return whether a task has ended, and then which of its objects arrived; then its number is free.

        Raises:
            KeyError: no such task, or its end was reported already.
        """
        with self._lock:
            if task_id not in self._tasks:
                raise KeyError(f"no read task {task_id}; the end of a task is reported once")
            transfers = self._tasks[task_id]
            if not all(transfer.done for transfer in transfers):
                return TransferChannelReadResult(finished=False)
            del self._tasks[task_id]
            lost = self._lost.pop(task_id)
        return TransferChannelReadResult(True, [self._arrived(transfer) for transfer in transfers] + [False] * lost)

    def close(self) -> None:
        """Cancel what is under way; returns when nothing writes into the memory of this process any more."""
        with self._lock:
            transfers = [transfer for several in self._tasks.values() for transfer in several]
            self._tasks.clear()
            self._lost.clear()
        give_up(transfers)

    def _meet(self) -> _Peer:
        offer = read_offer(fetch_offer(self._peer_url, MEETING_S), _ServerOffer)
        self._fabric.connect(offer.address)
        return _Peer(af.RegionKey.from_bytes(offer.key), offer.align)

    def _part(self, number: int, local: Any, remote: Any) -> tuple[int, int, int]:
        for address in (local, remote):
            if address.offset % self._align:
                raise ValueError(f"object {number}: offset {address.offset} is not a multiple of {self._align}")
        if -(-local.size // self._align) != -(-remote.size // self._align):
            raise ValueError(f"object {number}: {local.size} bytes here and {remote.size} bytes at the peer")
        return local.offset, remote.offset, min(local.size, remote.size)

    def _arrived(self, transfer: Transfer) -> bool:
        try:
            transfer.result()
        except af.FabricError as error:
            self._forget(error)
            return False
        return True

    def _forget(self, error: af.FabricError) -> None:
        """Ask the peer for its memory again at the next read if it may be another process by then."""
        _log.warning("reading from %s failed: %s", self._peer_url, error)
        if isinstance(error, (af.PeerError, af.StaleKeyError)):
            self._peer = None


class FabricServer(TransferChannelServer):
    """Lets peers read the memory of this process."""

    def __init__(self, listen_url: str, advertise_url: str, l1_memory_desc: L1MemoryDesc, offer: bytes = b"") -> None:
        """Listen on `listen_url`.

        Raises:
            ValueError: not `host:port`.
            DeviceError: the port is taken, or the host is none of this machine.
        """
        self._offers = OfferServer(*parse_place(listen_url), lambda: offer)
        self.port: int = self._offers.port

    def close(self) -> None:
        """Stop answering those that look for this process."""
        self._offers.close()


class FabricChannel(TransferChannelContext):
    """The memory of this process, its server and its clients; LMCache makes one by the registered name."""

    def __init__(self, l1_memory_desc: L1MemoryDesc, listen_url: str, advertise_url: str, **kwargs: object) -> None:
        """Register the whole L1 memory and listen. Settings of other channels (`backends`) are ignored.

        Raises:
            ValueError: not `host:port`.
            DeviceError: no rail can be opened, no memory pinned, or the port is taken.
        """
        self._size, self._align = l1_memory_desc.size, l1_memory_desc.align_bytes
        self._fabric = process_fabric()
        self._lock = Lock()
        self._clients: dict[str, FabricClient] = {}
        memory = (ctypes.c_ubyte * self._size).from_address(l1_memory_desc.ptr)
        self._region = self._fabric.register(memory, access="read")
        try:
            offer = _ServerOffer(bytes(self._fabric.address), bytes(self._region.key("read")), self._align)
            encoded = msgspec.msgpack.encode(offer)
            self._server = FabricServer(listen_url, advertise_url, l1_memory_desc, encoded)
        except BaseException:
            self._region.release()
            raise

    def get_transfer_channel_server(self) -> FabricServer:
        """Return the server."""
        return self._server

    def get_transfer_channel_client(self, peer_advertise_url: str) -> FabricClient:
        """Return the client of a peer; the first call meets it.

        Raises:
            ValueError: not `host:port`.
            PeerError: it does not answer within 10 s, or is out of reach of the rails.
        """
        with self._lock:
            client = self._clients.get(peer_advertise_url)
        if client is None:
            fresh = FabricClient(self._fabric, self._region, self._align, peer_advertise_url)
            with self._lock:
                client = self._clients.setdefault(peer_advertise_url, fresh)
        return client

    def remove_transfer_channel_client(self, peer_advertise_url: str) -> None:
        """Forget a peer; its tasks are cancelled and drained."""
        with self._lock:
            client = self._clients.pop(peer_advertise_url, None)
        if client is not None:
            client.close()

    def get_transfer_channel_address(self, lmcache_addresses: list[tuple[int, int]]) -> list[TransferChannelAddress]:
        """Return the addresses of objects, given as (offset, bytes) in L1.

        Raises:
            ValueError: outside of L1.
        """
        for offset, size in lmcache_addresses:
            if offset < 0 or size < 0 or offset + size > self._size:
                raise ValueError(f"bytes {offset} to {offset + size} are outside of the {self._size} bytes of L1")
        return [TransferChannelAddress(offset=offset, size=size) for offset, size in lmcache_addresses]

    def get_num_connected_clients(self) -> int:
        """Return how many peers this process reads from."""
        with self._lock:
            return len(self._clients)

    def close(self) -> None:
        """Stop serving, cancel what is under way and release L1; the fabric stays open for other integrations.

        Raises:
            TransferError: a device may still touch L1, so it stays pinned until the process ends.
        """
        self._server.close()
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.close()
        self._region.release()

"""FabricPost: the words of a measured update over the fabric's own small messages: in parts, in order, nobody dies.

Runs on the process's trio loop. Services carry them over links that know of losses; a bench ends when a process does.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Mapping

import asyncfabric as af
from asyncfabric.weights.update import COORDINATOR, Found, Lost, WeightMessage, decode_message, encode_message

_HEAD = struct.Struct(">QHH")  # number of the part in what this sender ever sent here, part of the message, parts
_PART_BYTES = 8192 - _HEAD.size


class FabricPost:
    """The messenger of one participant."""

    def __init__(self, fabric: af.Fabric, name: str, addresses: Mapping[str, af.FabricAddress]) -> None:
        """Know everybody by address; who has a session with the coordinator finds it at once."""
        self._fabric = fabric
        self.names: tuple[str, ...] = tuple(addresses)
        self._addresses = addresses
        self._names = {address.incarnation: other for other, address in addresses.items()}
        self._messages = fabric.messages()
        self._sent: dict[str, int] = defaultdict(int)
        self._leaving: dict[str, af.Transfer] = {}
        self._peers: dict[str, af.Peer] = {}
        self._next: dict[str, int] = defaultdict(int)
        self._early: dict[tuple[str, int], bytes] = {}
        self._parts: dict[str, list[bytes]] = defaultdict(list)
        found = [other for other in addresses if other != name] if name == COORDINATOR else [COORDINATOR]
        self._ready: list[tuple[str, WeightMessage | Found | Lost]] = [(other, Found()) for other in reversed(found)]

    async def send(self, to: str, message: WeightMessage) -> None:
        """Send a message, as links do: it leaves by itself; raises PeerError when the one before it could not leave."""
        data = encode_message(message)
        parts = max(1, -(-len(data) // _PART_BYTES))
        numbers = range(self._sent[to], self._sent[to] + parts)
        self._sent[to] += parts
        peer = self._peers.get(to)
        if peer is None:
            peer = self._peers[to] = await self._fabric.connect(self._addresses[to])
        for part, number in enumerate(numbers):
            body = data[part * _PART_BYTES : (part + 1) * _PART_BYTES]
            while True:
                try:
                    transfer = self._fabric.send(peer, _HEAD.pack(number, part, parts) + body)
                    break
                except af.BusyError:
                    await self._fabric.wait_writable()
            before = self._leaving.get(to)
            self._leaving[to] = transfer
            if before is not None:
                await before

    async def receive(self) -> tuple[str, WeightMessage | Found | Lost]:
        """Return what comes next, each sender's words in its order."""
        while not self._ready:
            message = await self._messages.__anext__()
            sender = self._names[message.peer.incarnation]
            number, _, _ = _HEAD.unpack_from(message.payload)
            self._early[sender, number] = message.payload
            while (payload := self._early.pop((sender, self._next[sender]), None)) is not None:
                self._next[sender] += 1
                _, part, parts = _HEAD.unpack_from(payload)
                self._parts[sender].append(payload[_HEAD.size :])
                if part == parts - 1:
                    self._ready.insert(0, (sender, decode_message(b"".join(self._parts.pop(sender)))))
        return self._ready.pop()

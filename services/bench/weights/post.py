"""FabricPost: the words of a measured update over the fabric's own small messages: in parts, in order, nobody dies.

Runs on the process's trio loop. Services carry them over links that know of losses; a bench ends when a process does.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Mapping

import asyncfabric as af
from asyncfabric._notice import Notice
from asyncfabric.weights.update import COORDINATOR, Found, Lost, WeightMessage, decode_message, encode_message

_HEAD = struct.Struct(">HHQHH")  # from, to, number in what the one ever sent to the other, part of the message, parts
_PART_BYTES = 8192 - _HEAD.size

Event = WeightMessage | Found | Lost


class FabricPost:
    """The participants of one process, which share its fabric."""

    def __init__(self, fabric: af.Fabric, addresses: Mapping[str, af.FabricAddress]) -> None:
        """Know everybody by address."""
        self.fabric: af.Fabric = fabric
        self.names: tuple[str, ...] = tuple(addresses)
        self.numbers: dict[str, int] = {name: number for number, name in enumerate(self.names)}
        self._addresses = addresses
        self._peers: dict[str, af.Peer] = {}
        self._messages = fabric.messages()
        self._boxes: dict[int, FabricMessenger] = {}
        self.sending: deque[af.Transfer] = deque()

    def open(self, name: str) -> FabricMessenger:
        """Return the messenger of a participant who lives here; who has a session with the coordinator finds it."""
        box = self._boxes[self.numbers[name]] = FabricMessenger(self, name)
        return box

    async def peer(self, name: str) -> af.Peer:
        """Return the peer at which somebody lives; raises PeerError when it cannot be reached."""
        if name not in self._peers:
            self._peers[name] = await self.fabric.connect(self._addresses[name])
        return self._peers[name]

    async def take(self) -> None:
        """Wait for a message and put it into its box, with all others that are there."""
        payload = (await self._messages.__anext__()).payload
        self._boxes[_HEAD.unpack_from(payload)[1]].put(payload)
        self.take_nowait()

    def take_nowait(self) -> None:
        """Put the messages that are there into their boxes."""
        for message in self._messages.take_nowait():
            self._boxes[_HEAD.unpack_from(message.payload)[1]].put(message.payload)

    async def run(self) -> None:
        """Hand out what comes, for ever; needed where several live, a single one fetches its own."""
        while True:
            await self.take()

    def raise_failed(self) -> None:
        """Raise the error of a message that did not leave; nobody waits for those that do."""
        while self.sending and self.sending[0].ended:
            self.sending.popleft().result()

    @property
    def shared(self) -> bool:
        """Whether several live here."""
        return len(self._boxes) > 1


class FabricMessenger:
    """The messenger of one participant; made by `FabricPost.open`."""

    def __init__(self, post: FabricPost, name: str) -> None:
        self.names: tuple[str, ...] = post.names
        self._post = post
        self._number = post.numbers[name]
        self._sent: dict[str, int] = defaultdict(int)
        self._next: dict[int, int] = defaultdict(int)
        self._early: dict[tuple[int, int], bytes] = {}
        self._parts: dict[int, list[bytes]] = defaultdict(list)
        found = [other for other in post.names if other != name] if name == COORDINATOR else [COORDINATOR]
        self._ready: deque[tuple[str, Event]] = deque((other, Found()) for other in found)
        self._changed = Notice()

    async def send(self, to: str, message: WeightMessage) -> None:
        """Send a message, as links do: it leaves by itself; raises PeerError when the one before it could not leave."""
        data = encode_message(message)
        parts = max(1, -(-len(data) // _PART_BYTES))
        numbers = range(self._sent[to], self._sent[to] + parts)
        self._sent[to] += parts
        fabric, peer, number_of = self._post.fabric, await self._post.peer(to), self._post.numbers[to]
        for part, number in enumerate(numbers):
            body = data[part * _PART_BYTES : (part + 1) * _PART_BYTES]
            head = _HEAD.pack(self._number, number_of, number, part, parts)
            while True:
                try:
                    self._post.sending.append(fabric.send(peer, head + body))
                    break
                except af.BusyError:
                    await fabric.wait_writable()
        self._post.raise_failed()

    async def receive(self) -> tuple[str, Event]:
        """Return what comes next, each sender's words in its order."""
        while not self._ready:
            if self._post.shared:
                await self._changed.wait()
            else:
                await self._post.take()
        return self._ready.popleft()

    def take_nowait(self) -> list[tuple[str, Event]]:
        """Return what is there already."""
        if not self._post.shared:
            self._post.take_nowait()
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def put(self, payload: bytes) -> None:
        """Take a part of a message."""
        source, _, number, _, _ = _HEAD.unpack_from(payload)
        self._early[source, number] = payload
        while (payload := self._early.pop((source, self._next[source]), b"")) != b"":
            self._next[source] += 1
            _, _, _, part, parts = _HEAD.unpack_from(payload)
            self._parts[source].append(payload[_HEAD.size :])
            if part == parts - 1:
                whole = decode_message(b"".join(self._parts.pop(source)))
                self._ready.append((self._post.names[source], whole))
                self._changed.tell()

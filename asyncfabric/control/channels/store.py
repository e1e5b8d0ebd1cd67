"""StoreChannels: channels over a key-value store, such as a torch.distributed TCPStore that a training has anyway.

Event loop's thread, apart from the store's calls (store_calls), which block: they run in threads, one at a time and in
order. A cancelled caller waits for its call for at most SETTLE_S: an interpreter that ends while a thread is inside
torch's C++ aborts, and a store whose host is gone may not answer for minutes. A process polls the store, more often
while messages come and go there. Members of one process hand theirs over without it, and between processes that use a
fabric messages go over that (direct).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from asyncfabric._groups import beside
from asyncfabric._notice import Notice
from asyncfabric.control.channels.channel import WINDOW, Codec
from asyncfabric.control.channels.direct import DirectPath
from asyncfabric.control.channels.fabric_sessions import MessageFabric
from asyncfabric.control.channels.member import MemberChannel
from asyncfabric.control.channels.pieces import MessagePiece, PieceStream
from asyncfabric.control.channels.store_calls import (
    Change,
    KeyStore,
    MemberFound,
    MemberLost,
    PieceFetched,
    StoreBox,
    StoreCalls,
    StoreMember,
)
from asyncfabric.errors import BrokenError, PeerError

POLL_S = 0.005
BUSY_POLL_S, BUSY_S = 0.0005, 0.1
"""How often a process looks for so long after a message: one is often answered."""
DEADLINE_S = 5.0
SETTLE_S = 1.0

Message = TypeVar("Message")
Result = TypeVar("Result")


class StoreChannels(Generic[Message]):
    """The members of this process, and those of others that use the same store and prefix.

    A prefix is for one life of a job: what members that died had not received stays in the store.
    """

    def __init__(
        self,
        store: KeyStore,
        codec: Codec[Message],
        *,
        prefix: str = "asyncfabric",
        window: int = WINDOW,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Carry the messages of a codec over a store; who gives no sign of life for `deadline_s` is lost.

        Where the program itself waits for keys of the store, give `connected_apart(store)`.

        Raises:
            ValueError: window or deadline_s is not positive.
        """
        if window < 1 or not deadline_s > 0:
            raise ValueError(f"window and deadline_s must be positive, got {window} messages, {deadline_s} s")
        self._calls = StoreCalls(store, prefix, window, deadline_s)
        self._codec = codec
        self._prefix = prefix
        self._window = window
        self._deadline_s = deadline_s
        self._order = anyio.CapacityLimiter(1)  # the calls are made in order
        self._lock = threading.Lock()  # and not at the same time, where a cancelled caller gave its place back
        self._threads = anyio.CapacityLimiter(inf)
        self._boxes: dict[str, StoreBox] = {}
        self._peers: dict[str, StoreMember] = {}
        self._leaving: dict[int, tuple[MemberLost, float]] = {}  # who left while pieces are on their way; until when
        self._direct: DirectPath | None = None
        self._failure = ""
        self._busy_until_s = 0.0
        self._sent = Notice()

    def use_fabric(self, fabric: MessageFabric) -> None:
        """Send messages over a fabric to members whose processes use one too, and through the store to others.

        It is called before `run` and before members are opened. Nobody else reads the fabric's messages. What cannot be
        sent over it, as between fabrics that do not reach each other, goes through the store.
        """
        self._direct = DirectPath(fabric, self._arrived)

    async def open(self, name: str) -> MemberChannel[Message]:
        """Join as a member of this name; one of the same name in another process is replaced.

        Raises:
            ValueError: the name is taken in this process.
            BrokenError: the store does not answer.

        Cancellation: others may find the name, and lose it after `deadline_s`.
        """
        if name in self._boxes:
            raise ValueError(f"{name!r} is there already")
        address = self._direct.address if self._direct is not None else ""
        number = await self._call(partial(self._calls.join, name, address))
        box = self._boxes[name] = StoreBox(MemberChannel(name, self, self._codec), number)
        for peer in self._peers.values():
            box.channel.find(peer.name)
        return box.channel

    async def run(self) -> None:
        """Receive, and give signs of life, for ever; nothing comes without it.

        Raises:
            BrokenError: the store does not answer any more, or others lost a member of this process.

        Cancellation: the channels end, and the peers lose them after `deadline_s`.
        """
        try:
            async with beside() as tasks:
                if self._direct is not None:
                    tasks.start_soon(self._direct.run)
                while True:
                    await self._look()
                    if monotonic() < self._busy_until_s:
                        await anyio.sleep(BUSY_POLL_S)
                    else:
                        with anyio.move_on_after(POLL_S):
                            await self._sent.wait()
        finally:
            for box in self._boxes.values():
                box.channel.end()

    # ---- Carrier

    async def carry(self, source: str, to: str, data: bytes) -> None:
        """Send a message; see Carrier.

        Cancellation: the message is sent whole, or not at all.
        """
        while True:
            peer = self._peers.get(to)
            if peer is None:
                raise PeerError(f"there is no session with {to}", remedy="is its process alive, on the same store?")
            mine, box = self._boxes[source], self._boxes.get(to)
            if box is not None and box.number == peer.number:
                if self._hand_over(mine, box, data):
                    return
            elif self._send_directly(mine, peer, data):
                return
            elif await self._call(partial(self._calls.send, mine, peer.number, data)):
                self._note_busy()
                self._sent.notify()
                return
            await anyio.sleep(POLL_S)

    async def leave(self, name: str) -> None:
        """Note in the store that a member is gone, when what it sent has arrived; see Carrier.

        Cancellation: it is noted all the same once the store answers.
        """
        box = self._boxes[name]
        if self._direct is not None:
            with anyio.move_on_after(self._deadline_s):
                await self._direct.wait_sent(box.number)
            await self._store_unsent()
        del self._boxes[name]
        peers = [peer.number for peer in self._peers.values()]
        await self._call(partial(self._calls.leave, box, peers))

    def taken(self, source: str, to: str) -> None:
        """The next poll looks at what was received."""

    async def more(self, changed: Notice) -> None:
        """Wait for a change.

        Cancellation: only this wait ends.
        """
        await changed.wait()

    def gather_nowait(self) -> None:
        """Put what came over the fabric into the members' ends."""
        if self._direct is not None:
            self._direct.gather_nowait()

    # ---- what happens

    async def _look(self) -> None:
        """Take in what the store has, and give it what the fabric could not carry."""
        changes = await self._call(partial(self._calls.poll, list(self._boxes.values()), list(self._peers.values())))
        for change in changes:
            self._do(change)
        for lost, until_s in list(self._leaving.values()):
            self._lose(lost, until_s)
        await self._store_unsent()
        if changes:
            self._note_busy()

    def _do(self, change: Change) -> None:
        if isinstance(change, PieceFetched):
            self._receive(change.box, change.peer, change.piece)
        elif isinstance(change, MemberFound):
            self._find(change.peer)
        else:
            self._lose(change, monotonic() + self._deadline_s)

    def _find(self, peer: StoreMember) -> None:
        self._peers[peer.name] = peer
        if self._direct is not None and peer.address:
            self._direct.find(peer.number, peer.address)
        for name, box in self._boxes.items():
            if name != peer.name:
                box.channel.find(peer.name)

    def _lose(self, lost: MemberLost, until_s: float) -> None:
        """End the sessions with a member, once all has come that it had sent, or at the latest then."""
        number = lost.peer.number
        came = all(self._stream(box, number).number >= lost.sent.get(box.number, 0) for box in self._boxes.values())
        if came or monotonic() >= until_s:
            self._leaving.pop(number, None)
            self._end(lost.peer, lost.reason)
        else:
            self._leaving.setdefault(number, (lost, until_s))

    def _end(self, peer: StoreMember, reason: str) -> None:
        if self._peers.get(peer.name) is peer:
            if self._direct is not None:
                self._direct.lose(peer.number)
            del self._peers[peer.name]
            for box in self._boxes.values():
                box.channel.lose(peer.name, reason)

    def _arrived(self, piece: MessagePiece) -> None:
        """Take in a piece that came over the fabric."""
        for box in self._boxes.values():
            for peer in self._peers.values():
                if piece.to == str(box.number) and piece.source == str(peer.number):
                    self._receive(box, peer, piece)
                    return

    def _stream(self, box: StoreBox, number: int) -> PieceStream:
        return box.received.setdefault(number, PieceStream())

    def _receive(self, box: StoreBox, peer: StoreMember, piece: MessagePiece) -> None:
        """Take in a piece, and put what is whole by it into the channel."""
        stream = self._stream(box, peer.number)
        for found in stream.in_order(piece):
            if (data := stream.whole(found)) is not None:
                box.channel.put(peer.name, data)
                box.whole[peer.number] = stream.messages
        if stream.overrun or box.channel.untaken(peer.name) > self._window:
            self._end(peer, "it sent more than its window has room for")

    # ---- sending

    def _hand_over(self, source: StoreBox, to: StoreBox, data: bytes) -> bool:
        """Give a message to a member of this process, or return False while its window is full or has no session."""
        found = self._peers.get(source.channel.name)
        if found is None or found.number != source.number or to.channel.untaken(found.name) >= self._window:
            return False
        to.channel.put(found.name, data)
        return True

    def _send_directly(self, box: StoreBox, peer: StoreMember, data: bytes) -> bool:
        """Send a message over the fabric, or return False where the store has to be asked or used."""
        stream = box.sent.setdefault(peer.number, PieceStream())
        if self._direct is None or stream.messages - stream.taken >= self._window:
            return False
        return self._direct.send(box.number, peer.number, stream, data)

    async def _store_unsent(self) -> None:
        """Put into the store what the fabric did not carry."""
        unsent = self._direct.take_unsent() if self._direct is not None else []
        if unsent:
            boxes = {str(box.number): box for box in self._boxes.values()}

            def put() -> None:
                for piece in unsent:
                    if piece.source in boxes:
                        self._calls.put(boxes[piece.source], piece)

            await self._call(put)
            self._note_busy()

    def _note_busy(self) -> None:
        self._busy_until_s = monotonic() + BUSY_S

    async def _call(self, what: Callable[[], Result]) -> Result:
        finished = threading.Event()

        def call() -> Result:
            try:
                with self._lock:
                    return self._done(what)
            finally:
                finished.set()

        async with self._order:
            await anyio.lowlevel.checkpoint_if_cancelled()  # from here on the thread begins for certain
            try:
                return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
            finally:
                if not finished.is_set():
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(finished.wait, SETTLE_S, limiter=self._threads)

    def _done(self, what: Callable[[], Result]) -> Result:
        if self._failure:
            raise BrokenError(f"the store of {self._prefix} is lost: {self._failure}")
        try:
            return what()
        except Exception as error:  # each store has exceptions of its own
            self._failure = str(error) or type(error).__name__
            raise BrokenError(f"the store of {self._prefix} is lost: {self._failure}") from error

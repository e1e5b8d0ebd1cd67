"""SharedTable: the directory's table as a log of decisions in a store, the same for all directories of a cluster.

On the event loop's thread. A decision takes the next number of the log by `create`, which has one winner; the others
take it in and decide again on what is so then. So rules on names hold, and epochs are dense, across directories.

    founding            which log this is, and a proof of the secret     image/LOG    the table at some number
    decision/LOG/N      decision N                                       beat/NAME    changes while a directory lives

A directory that gives no sign of life for a lease, in which ours were written, is gone: its nodes have come to others,
or are lost. With a secret each value is sealed by it, so that who can write to the store cannot put a node in.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import zlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Final

import anyio
import msgspec
from msgspec import Meta, Struct

from asyncfabric.control.directory import Decision, DirectoryTable, TableImage
from asyncfabric.control.messages import Identity, Number, Text
from asyncfabric.control.stores.memory import DirectoryStore
from asyncfabric.errors import BrokenError
from asyncfabric.unreadable import UNREADABLE

log: logging.Logger = logging.getLogger("asyncfabric.control")

IMAGE_EVERY: Final = 64
KEPT_DECISIONS: Final = 1024
MOST_IMAGE_BYTES: Final = 1 << 26
IMAGE_LOOK_S: Final = 1.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
SEAL_BYTES: Final = 32
_SEAL: Final = b"asyncfabric directory store 1"


class _Founding(Struct, frozen=True):
    log: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    proof: Annotated[bytes, Meta(max_length=32)]
    founder: Text


class _Image(Struct, frozen=True):
    number: Number = 0
    table: TableImage = TableImage()


class SharedTable:
    """The table, up to date while `follow` and `keep_alive` run."""

    def __init__(
        self,
        store: DirectoryStore,
        directory: Identity,
        lease_ns: int,
        secret: bytes | None,
        *,
        applied: Callable[[Decision], None],
        begun: Callable[[], None],
    ) -> None:
        """Make the table of one directory.

        Args:
            store: that all directories of the cluster have.
            directory: this one.
            lease_ns: of nodes, and of directories among each other.
            secret: of the cluster's fabrics, the same at all of its directories; None without keys.
            applied: called after each decision, of whichever directory, and with an empty one when leases change.
            begun: called when the table is another one: the store lost the former, or this directory fell far behind.
        """
        self.table: DirectoryTable = DirectoryTable(lease_ns, directory=directory)
        self.log: str = ""
        self.trouble: str = ""
        self._store = store
        self._directory = directory
        self._lease_ns = lease_ns
        self._seal = hmac.digest(secret, _SEAL, "sha256") if secret is not None else b""
        self._applied, self._begun = applied, begun
        self._lock = anyio.Lock()
        self._number = 0
        self._image_seen_s = 0.0
        self._beats = 0
        self._beat_ns = self._steady_ns = _now_ns()
        self._seen: dict[Identity, tuple[bytes | None, int]] = {}

    async def open(self) -> None:
        """Take part: found the log, or take in what it has. Waits for the store.

        Raises:
            ValueError: other directories of this store have another secret.

        Cancellation: others may find a sign of life.
        """
        await self._until_done(self._begin)
        await self._until_done(self._beat)

    async def decide(self, decide: Callable[[DirectoryTable], Decision]) -> None:
        """Have a decision taken in, made anew on each state of the table that others bring about meanwhile.

        Waits for the store.

        Cancellation: it may be in the log, and is taken in like those of others.
        """

        async def attempt() -> None:
            while True:
                await self._catch_up()
                decision = decide(self.table)
                if decision.is_empty:
                    return
                key = self._key(self._number + 1)
                if await self._store.create(key, self._sealed(key, msgspec.msgpack.encode(decision))):
                    self._take(decision)
                    await self._keep_image()
                    return

        await self._until_done(attempt)

    async def follow(self) -> None:
        """Take in what others decide, for ever.

        Cancellation: the table stays as it is.
        """
        while True:
            await self._until_done(self._catch_up)
            try:
                await self._store.wait(self._key(self._number + 1))
            except BrokenError as error:
                await self._pause(error, FIRST_PAUSE_S)

    async def keep_alive(self) -> None:
        """Give signs of life, and release the nodes of directories that give none, for ever.

        Cancellation: others find it silent.
        """
        while True:
            await anyio.sleep(self._lease_ns / 3e9)
            await self._until_done(self._beat)

    # ---- with the store; each raises BrokenError, and is done again

    async def _until_done(self, work: Callable[[], Awaitable[None]]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._lock:
                    await work()
            except BrokenError as error:
                await self._pause(error, pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            if self.trouble:
                log.warning("directory %s: its store is back", self._directory)
                self.trouble = ""
            return

    async def _pause(self, error: BrokenError, pause_s: float) -> None:
        if not self.trouble:
            log.warning("directory %s: its store is away; nothing changes until it is back: %s", self._directory, error)
        self.trouble = str(error)
        self._steady_ns = _now_ns()
        await anyio.sleep(pause_s)

    async def _begin(self) -> None:
        proof = hmac.digest(self._seal, b"founding", "sha256") if self._seal else b""
        mine = _Founding(secrets.token_hex(8), proof, self._directory.name)
        await self._store.create("founding", msgspec.msgpack.encode(mine))
        found = await self._founding()
        if found is None:
            raise BrokenError("the store has no founding that can be read", remedy="is its prefix of another program?")
        if not hmac.compare_digest(found.proof, proof):
            raise ValueError(
                f"directory {self._directory.name} has another secret than {found.founder}, which founded this store: "
                "all directories of a cluster have the same key file; with new keys they begin under another prefix"
            )
        self.log = found.log
        self._load(await self._image())
        await self._catch_up()

    async def _founding(self) -> _Founding | None:
        value = await self._store.get("founding")
        try:
            return None if value is None else msgspec.msgpack.decode(value, type=_Founding)
        except UNREADABLE:
            return None

    async def _catch_up(self) -> None:
        while (value := await self._store.get(key := self._key(self._number + 1))) is not None:
            try:
                decision = msgspec.msgpack.decode(self._unsealed(key, value), type=Decision)
            except UNREADABLE as error:
                self._number += 1  # every directory passes over it
                log.error("directory %s: %s in the store is passed over: %s", self._directory, key, error)
            else:
                self._take(decision)
        if anyio.current_time() - self._image_seen_s > IMAGE_LOOK_S:  # the decision that comes next may be deleted
            image = await self._image()
            if image.number > self._number:
                self._load(image)
                await self._catch_up()

    async def _image(self) -> _Image:
        key = f"image/{self.log}"
        value = await self._store.get(key)
        self._image_seen_s = anyio.current_time()
        if value is None:
            return _Image()
        try:
            body = zlib.decompressobj().decompress(self._unsealed(key, value), MOST_IMAGE_BYTES)
            return msgspec.msgpack.decode(body, type=_Image)
        except (zlib.error, *UNREADABLE) as error:
            raise BrokenError(f"{key} in the store cannot be read: {error}") from None

    async def _keep_image(self) -> None:
        if self._number % IMAGE_EVERY:
            return
        key, image = f"image/{self.log}", _Image(self._number, self.table.image())
        old = range(max(1, self._number - KEPT_DECISIONS - IMAGE_EVERY + 1), self._number - KEPT_DECISIONS + 1)
        try:
            await self._store.put(key, self._sealed(key, zlib.compress(msgspec.msgpack.encode(image))))
            await self._store.delete([self._key(number) for number in old])
        except BrokenError as error:  # the decision is in; the next image is as good
            log.warning("directory %s: an image of the table was not kept: %s", self._directory, error)

    async def _beat(self) -> None:
        found = await self._founding()
        if found is None or found.log != self.log:
            log.error("directory %s: its store begins anew, so nodes register again", self._directory)
            await self._begin()
        if _now_ns() - self._beat_ns > self._lease_ns:
            self._steady_ns = _now_ns()  # this process stood still, and maybe others with it
        self._beats += 1
        await self._store.put(f"beat/{self._directory.name}", f"{self._directory.incarnation}:{self._beats}".encode())
        self._beat_ns = _now_ns()
        for other in self.table.holders():
            await self._judge(other, await self._store.get(f"beat/{other.name}"))

    async def _judge(self, other: Identity, beat: bytes | None) -> None:
        """Release the nodes of a directory that started again, or was silent for a lease in which we were not."""
        now_ns = _now_ns()
        if other not in self._seen or self._seen[other][0] != beat:
            self._seen[other] = beat, now_ns
        if beat is not None and beat.partition(b":")[0] != str(other.incarnation).encode():
            deadline_ns = now_ns + self._lease_ns
        elif now_ns - max(self._seen[other][1], self._steady_ns) >= self._lease_ns:
            deadline_ns = now_ns
        else:
            return
        self.table.release(other, deadline_ns)
        self._applied(Decision())

    # ---- values

    def _take(self, decision: Decision) -> None:
        self._number += 1
        if self.table.apply(decision, _now_ns()):
            self._applied(decision)
        else:
            log.error("directory %s: decision %d in the store follows no other", self._directory, self._number)

    def _load(self, image: _Image) -> None:
        self._number = image.number
        self.table = DirectoryTable(self._lease_ns, directory=self._directory, image=image.table)
        self.table.release(self._directory, _now_ns() + self._lease_ns)  # those that it holds renew
        self._seen.clear()
        self._begun()

    def _key(self, number: int) -> str:
        return f"decision/{self.log}/{number}"

    def _sealed(self, key: str, body: bytes) -> bytes:
        return hmac.digest(self._seal, key.encode() + body, "sha256") + body if self._seal else body

    def _unsealed(self, key: str, value: bytes) -> bytes:
        """Return the body of a value; raises ValueError for one that has no seal of ours."""
        if not self._seal:
            return value
        body = value[SEAL_BYTES:]
        if not hmac.compare_digest(value[:SEAL_BYTES], self._sealed(key, body)[:SEAL_BYTES]):
            raise ValueError("it is not sealed by the secret of this cluster")
        return body


def _now_ns() -> int:
    return int(anyio.current_time() * 1e9)

"""Two engines that talk, and a patient reader of their completions: what the protocol tests are written in.

One thread per test. Waiting always goes through arm / fd / disarm / poll, so each test checks that protocol too.
"""

from __future__ import annotations

import ctypes
import select
import time
from collections.abc import Callable, Iterable
from itertools import count

from asyncfabric._bridge.engine import Completion, CompletionKind, Engine
from asyncfabric._bridge.status import StatusCode

PATIENCE_S = 20.0
HOST = -1
WRITE, READ, BOTH = 1, 2, 3

_cookies = count(1000)


class Party:
    """One engine with its completions sorted by cookie. `others` are stepped along when polling is manual."""

    def __init__(self, engine: Engine, *, manual: bool = False) -> None:
        self.engine = engine
        self.manual = manual
        self.others: list[Party] = [self]
        self.seen: list[Completion] = []

    def cookie(self) -> int:
        """Return a cookie that nobody used."""
        return next(_cookies)

    def gather(self) -> list[Completion]:
        """Take what is there."""
        fresh = self.engine.poll(256)
        self.seen += fresh
        return fresh

    def wait(self, found: Callable[[Completion], bool], what: str) -> Completion:
        """Return the first completion that fits, and forget it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.gather()
            for one in self.seen:
                if found(one):
                    self.seen.remove(one)
                    return one
            left = deadline - time.monotonic()
            assert left > 0, f"no {what} within {PATIENCE_S} s; seen: {self.seen}"
            if self.manual:
                for party in self.others:
                    party.engine.step()
            elif self.engine.arm():
                select.select([self.engine.completion_fd()], [], [], left)
                self.engine.disarm()

    def take(self, cookie: int) -> Completion:
        """Return the completion of a cookie."""
        return self.wait(lambda one: one.cookie == cookie, f"completion of cookie {cookie}")

    def take_ok(self, cookie: int) -> Completion:
        """Return the completion of a cookie that must have succeeded."""
        one = self.take(cookie)
        assert one.code == StatusCode.OK, (StatusCode(one.code), self.engine.last_error())
        return one

    def take_kind(self, kind: CompletionKind) -> Completion:
        """Return the next completion of a kind."""
        return self.wait(lambda one: one.kind == kind, kind.name)

    def allocate(self, length: int, access: int = BOTH) -> int:
        """Return a region of engine memory."""
        cookie = self.cookie()
        self.engine.submit_allocate(cookie, length, HOST, access)
        return self.take_ok(cookie).value

    def register(self, buffer: bytearray, access: int = BOTH) -> int:
        """Return a region over a bytearray; the test keeps it alive."""
        cookie = self.cookie()
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.engine.submit_register(cookie, address, len(buffer), HOST, access)
        return self.take_ok(cookie).value

    def connect(self, other: Party) -> int:
        """Return the peer id of another party."""
        cookie = self.cookie()
        self.engine.submit_connect(cookie, other.engine.address())
        return self.take_ok(cookie).value

    def release(self, region: int) -> Completion:
        """Release and return how it ended."""
        cookie = self.cookie()
        self.engine.submit_release(cookie, region)
        return self.take(cookie)

    def key_of(self, owner: Party, region: int, access: int = BOTH, offset: int = 0, length: int | None = None) -> int:
        """Open a key that the owner hands out."""
        length = owner.engine.region_info(region).length - offset if length is None else length
        return self.engine.open_key(owner.engine.region_key(region, access, offset, length))[0]

    def write(
        self, region: int, offset: int, length: int, key: int, target_offset: int = 0, imm: int = -1
    ) -> Completion:
        """Write and return how it ended."""
        cookie = self.cookie()
        self.engine.submit_write(cookie, region, offset, length, key, target_offset, imm)
        return self.take(cookie)

    def fill(self, region: int, data: bytes) -> None:
        """Set the first bytes of a region."""
        self.engine.region_memory(region)[: len(data)] = data

    def bytes_of(self, region: int) -> bytes:
        """Return what a region holds."""
        return bytes(self.engine.region_memory(region))

    def count_to(self, counter: int, target: int) -> int:
        """Wait for a counter and return its value."""
        cookie = self.cookie()
        self.engine.arm_counter(counter, cookie, target)
        return self.take_ok(cookie).value


def settles(party: Party, name: str, value: int) -> bool:
    """Wait until a statistic has a value; the engine may note what happened after it reported what happened."""
    deadline = time.monotonic() + PATIENCE_S
    while party.engine.statistics()[name] < value and time.monotonic() < deadline:
        party.gather()
    return party.engine.statistics()[name] == value


def join(parties: Iterable[Party]) -> list[Party]:
    """Let parties step each other."""
    joined = list(parties)
    for party in joined:
        party.others = joined
    return joined

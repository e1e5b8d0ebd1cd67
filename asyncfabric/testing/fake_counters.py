"""Counters and watch words of a fake engine: count first, arm later; a generation per imm keeps late arrivals out.

Every call is made under the lock of the network, except loads and stores of a watch word, which anyone may do. Who
sleeps on a value is not known here: a table only calls back with the cookie that was armed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncfabric._bridge.faults import MAX_WATCH_WORDS
from asyncfabric._bridge.status import StatusCode, refusal
from asyncfabric.types import MAX_IMM

_FIRST_PICK = (MAX_IMM + 1) // 2  # picked imms start in the upper half, far from the small numbers that people name


@dataclass(slots=True, eq=False)
class _Imm:
    """State of one imm value. `counter` 0: none is open; `generation` moves when a counter is closed.

    `under_way` are the senders, by incarnation, of ops that count for the closed counter and have not ended.
    """

    counter: int = 0
    generation: int = 0
    value: int = 0
    closed: bool = False
    armed: tuple[int, int] | None = None  # cookie, target
    under_way: list[int] = field(default_factory=list)
    closed_ns: int = 0
    cookies: list[int] = field(default_factory=list)  # of those who want to open it again


class CounterTable:
    """All counters of one engine, by imm."""

    def __init__(
        self,
        reached: Callable[[int, int], None],
        confirmed: Callable[[int, int], None],
        statistics: dict[str, int],
    ) -> None:
        self._reached = reached
        self._confirmed = confirmed
        self._statistics = statistics
        self._imms: dict[int, _Imm] = {}
        self._open: dict[int, int] = {}
        self._last_id = 0
        self._next_pick = _FIRST_PICK

    def open(self, imm: int) -> tuple[int, int]:
        """Open the counter of an imm, or of a free one for -1."""
        imm = self._pick() if imm == -1 else imm
        state = self._imms.setdefault(imm, _Imm())
        if state.counter:
            raise refusal(StatusCode.BUSY, f"imm {imm} already has an open counter")
        if state.under_way:
            raise refusal(StatusCode.UNCONFIRMED, f"imm {imm}")
        if state.closed:
            state.value, state.closed = 0, False
        self._last_id += 1
        state.counter = self._last_id
        self._open[self._last_id] = imm
        return self._last_id, imm

    def _pick(self) -> int:
        for _ in range(MAX_IMM + 1):
            imm = self._next_pick
            self._next_pick = (imm + 1) & MAX_IMM
            state = self._imms.get(imm)
            if state is None or (not state.counter and state.closed and not state.under_way):
                return imm  # never one with early arrivals: they belong to whoever will open that imm by name
        raise refusal(StatusCode.BUSY, "all imm values have an open counter")

    def close(self, counter: int) -> int | None:
        """Close; arrivals of this generation are stale from now on. Returns the imm, None when it was closed before."""
        imm = self._open.pop(counter, None)
        if imm is not None:
            state = self._imms[imm]
            state.counter, state.closed, state.armed = 0, True, None
            state.generation += 1
            state.closed_ns = time.monotonic_ns()
        return imm

    def hold(self, imm: int, incarnation: int) -> None:
        """Keep a closed imm from being opened: this sender has an op under way that counts for the last counter."""
        self._imms[imm].under_way.append(incarnation)
        self._statistics["unconfirmed_closes"] += len(self._imms[imm].under_way) == 1

    def release(self, imm: int, incarnation: int) -> None:
        """Undo one `hold`, because the op has ended."""
        state = self._imms[imm]
        state.under_way.remove(incarnation)
        if not state.under_way:
            self._statistics["unconfirmed_closes"] -= 1
            cookies, state.cookies = state.cookies, []
            for cookie in cookies:
                self._confirmed(cookie, imm)

    def arm_closed(self, cookie: int, imm: int) -> None:
        """Call back once when nothing is under way for the last counter of an imm."""
        state = self._imms.setdefault(imm, _Imm())
        if state.under_way:
            state.cookies.append(cookie)
        else:
            self._confirmed(cookie, imm)

    def closings(self, imm: int) -> list[tuple[int, int, list[int]]]:
        """Return imm, age and senders of the closes that wait for ops; -1: of any imm."""
        chosen = self._imms.items() if imm == -1 else [(imm, self._imms.get(imm, _Imm()))]
        now = time.monotonic_ns()
        return [(one, now - state.closed_ns, sorted(set(state.under_way))) for one, state in chosen if state.under_way]

    def value(self, counter: int) -> int:
        """Return how much arrived; of a closed counter 0."""
        return self._state(counter).value if counter in self._open else 0

    def check_open(self, counter: int) -> None:
        """Refuse a closed counter."""
        self._state(counter)

    def generation(self, imm: int) -> int:
        """Return what a sender must stamp on an arrival that it submits now."""
        state = self._imms.get(imm)
        return state.generation if state is not None else 0

    def arm(self, counter: int, cookie: int, target: int) -> None:
        """Call back once when the value is at least `target`; replaces an earlier arming."""
        state = self._state(counter)
        state.armed = (cookie, target)
        self._fire(state)

    def arrive(self, imm: int, generation: int, worth: int) -> None:
        """Count an arrival, early or in time, or put it aside as stale."""
        state = self._imms.setdefault(imm, _Imm())
        if state.closed or generation != state.generation:
            self._statistics["stale_arrivals"] += worth
            return
        if not state.counter:
            self._statistics["early_arrivals"] += worth
        state.value += worth
        self._fire(state)

    def _state(self, counter: int) -> _Imm:
        try:
            return self._imms[self._open[counter]]
        except KeyError:
            raise refusal(StatusCode.CLOSED, f"counter {counter} was closed or never existed") from None

    def _fire(self, state: _Imm) -> None:
        if state.armed is not None and state.value >= state.armed[1]:
            cookie, state.armed = state.armed[0], None
            self._reached(cookie, state.value)


class WatchTable:
    """64-bit words in real memory that any thread may store to by address."""

    def __init__(self, changed: Callable[[int, int], None]) -> None:
        self._changed = changed
        self._words: dict[int, ctypes.c_uint64] = {}
        self._armed: dict[int, tuple[int, int]] = {}
        self._kept: list[ctypes.c_uint64] = []  # a late store by address must never hit foreign memory
        self._last_id = 0

    def open(self) -> tuple[int, int]:
        """Return the id and the address of a new word, zero."""
        if len(self._words) == MAX_WATCH_WORDS:
            raise refusal(StatusCode.BUSY, f"{MAX_WATCH_WORDS} watch words")
        self._last_id += 1
        word = self._words[self._last_id] = ctypes.c_uint64(0)
        return self._last_id, ctypes.addressof(word)

    def close(self, watch: int) -> None:
        """Close; idempotent."""
        self._armed.pop(watch, None)
        word = self._words.pop(watch, None)
        if word is not None:
            self._kept.append(word)

    def word(self, watch: int) -> ctypes.c_uint64:
        """Return the word itself."""
        try:
            return self._words[watch]
        except KeyError:
            raise refusal(StatusCode.CLOSED, f"watch {watch} was closed or never existed") from None

    def arm(self, watch: int, cookie: int, seen: int) -> None:
        """Call back once when the word is not `seen`; replaces an earlier arming."""
        self.word(watch)
        self._armed[watch] = (cookie, seen)
        self.look()

    def look(self) -> int:
        """Compare every armed word, as the engine's worker does in each step; returns how many changed."""
        changed = 0
        for watch, (cookie, seen) in list(self._armed.items()):
            value = self._words[watch].value
            if value != seen:
                del self._armed[watch]
                self._changed(cookie, value)
                changed += 1
        return changed

    @property
    def armed(self) -> bool:
        """Whether somebody waits for a word."""
        return bool(self._armed)

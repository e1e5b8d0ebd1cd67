"""One receiver of weight updates as a state machine: what it holds, what it receives, what may serve. Sans-io.

    IDLE -> Prepare -> RECEIVING -> all bytes are right -> VERIFIED (in doubt) -> Commit -> COMMITTED -> flip -> IDLE
    IDLE -> CatchUp -> FETCHING -> complete -> COMMITTED

WC-4: memory that is opened for a version has keys that no earlier version had, and `Discard` takes them back before the
memory is used again: a late write of an aborted version is refused, never mixed in. WC-5: `serving` changes in
`flip` alone, at a step boundary, to a version that was complete and decided, or to none: in place the memory is opened
once nothing serves from it, and reports that. A receiver in doubt keeps what it serves.

WC-7: each `Open` and `Fetch` begins an arrival with a number of its own. A version may be begun again while an earlier
arrival of it still ends, on a thread that cannot be cancelled; what an arrival reports counts only while it is the
latest one, and what serves is the copy that the accepted arrival filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.weights.messages import (
    Abort,
    CatchUp,
    Commit,
    Difference,
    Failed,
    Fetched,
    FromReceiver,
    Prepare,
    Reached,
    Ready,
    Standing,
    Stopped,
    ToReceiver,
    Verified,
)


class State(Enum):
    """Where a receiver stands."""

    IDLE = "idle"
    RECEIVING = "receiving"
    VERIFIED = "verified"
    COMMITTED = "committed"
    FETCHING = "fetching"


@dataclass(frozen=True, slots=True)
class Report:
    """Effect: send a message to the coordinator."""

    message: FromReceiver


@dataclass(frozen=True, slots=True)
class Open:
    """Effect: open the memory for a version under new keys and arm its counters, then call `opened`."""

    version: int
    manifest: str
    arrival: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Effect: get a version from another receiver under new keys, check it, then call `fetched`."""

    version: int
    source: str
    arrival: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Effect: take back the keys of an arrival and forget its bytes; what was under way for it ends."""

    version: int
    arrival: int


Effect = Report | Open | Fetch | Discard


class Receiver:
    """The machine.

    Attributes:
        serving: the version that serves now, 0 for none.
        serving_arrival: the arrival that brought it, 0 for none.
        version: the version that `state` is about, 0 when idle.
        arrival: the arrival that `state` is about, 0 when idle.
        state: where it stands.
        manifest: of the plan that it reports to the coordinator.
        paused: in place: whether the memory may be opened when nothing serves from it.
    """

    def __init__(self, *, in_place: bool = False, paused: bool = True, serving: int = 0, manifest: str = "") -> None:
        """Begin with a version that was loaded some other way, 0 for none.

        In place memory is opened when nothing serves from it. Unless `paused`, its owner uses it also when nothing of
        ours serves: it is opened between `flip` and `resume` alone.
        """
        self.serving: int = serving
        self.serving_arrival: int = 0
        self.version: int = 0
        self.arrival: int = 0
        self.state: State = State.IDLE
        self.manifest: str = manifest
        self._arrivals = 0  # begun so far
        self.paused: bool = paused
        self._in_place = in_place
        self._in_session = False
        self._next: Prepare | CatchUp | None = None  # came before the flip
        self._at_stop: Open | Fetch | None = None  # waits until nothing serves from the one copy
        self._left_out = 0  # a version that waited for a step boundary and was taken back, 0 for none

    @property
    def held(self) -> int:
        """The latest version that is complete and decided here; it serves now, or after the next flip."""
        return self.version if self.state is State.COMMITTED else self.serving

    @property
    def held_arrival(self) -> int:
        """The arrival that brought `held`, 0 for none."""
        return self.arrival if self.state is State.COMMITTED else self.serving_arrival

    @property
    def waits_for_flip(self) -> bool:
        """Whether the next `flip` changes anything."""
        return self.state is State.COMMITTED or self._at_stop is not None

    @property
    def coming(self) -> int:
        """In place: the version that the next `flip` lets in or lets serve, or one that did not wait for it; or 0."""
        if self._at_stop is not None or self.state is State.COMMITTED or (self.paused and self.state is not State.IDLE):
            return self.version
        return self._left_out

    @property
    def under_way(self) -> bool:
        """Whether a version is being written, or is whole and somebody is there who will decide about it."""
        if self.state is State.VERIFIED:
            return self._in_session
        return self._at_stop is None and self.state in (State.RECEIVING, State.FETCHING)

    def resume(self) -> None:
        """In place: what is to be opened from now on waits for the next `flip`. Nothing may be `under_way`."""
        self.paused = False

    def session_began(self, differs: Difference | None = None) -> list[Effect]:
        """Report where we stand, first to a coordinator, the same one or a new one; `differs` once it was refused."""
        self._in_session = True
        verified = self.version if self.state is State.VERIFIED else 0
        return [Report(Standing(self.held, verified, self._in_place, self.manifest, differs))]

    def session_lost(self) -> list[Effect]:
        """The coordinator is gone: what is not verified is given up, what is verified stays in doubt."""
        self._next, self._in_session = None, False
        return self._drop() if self.state is State.RECEIVING else []

    def received(self, message: ToReceiver) -> list[Effect]:
        """Take a message of the coordinator.

        Raises RemoteProtocolError for a commit of what is not complete here.
        """
        if isinstance(message, Prepare):
            return self._prepare(message)
        if isinstance(message, Commit):
            self._commit(message.version)
            return []
        if isinstance(message, Abort):
            return self._abort(message.version)
        return self._catch_up(message)

    def opened(self, arrival: int) -> list[Effect]:
        """The memory is open and the counters are armed."""
        return [Report(Ready(self.version))] if self._receives(arrival) else []

    def verified(self, arrival: int) -> list[Effect]:
        """Every byte of the version arrived and every checksum is right."""
        if not self._receives(arrival):
            return []
        self.state = State.VERIFIED
        return [Report(Verified(self.version))]

    def failed(self, arrival: int, reason: str) -> list[Effect]:
        """The version cannot be completed here: a checksum is wrong, memory could not be opened."""
        if not self._receives(arrival):
            return []
        version = self.version
        return [*self._drop(), Report(Failed(version, reason[:2000]))]

    def fetched(self, arrival: int, failure: str = "") -> list[Effect]:
        """The fetched version is complete and right, or `failure` states why not."""
        if self.state is not State.FETCHING or arrival != self.arrival:
            return []
        version = self.version
        if failure:
            return [*self._drop(), Report(Fetched(version, failure[:2000]))]
        self.state = State.COMMITTED
        return [Report(Fetched(version))]

    def flip(self) -> list[Effect]:
        """At a step boundary: let a committed version serve, or none where the memory is to be overwritten.

        A receiver that versions did not wait for reports that it is there again.
        """
        self.paused = True
        effects = self._flip()
        if self._left_out:
            reached, self._left_out = self._left_out, 0
            return [Report(Reached(reached)), *effects]
        return effects

    def _flip(self) -> list[Effect]:
        if self._at_stop is not None:
            begun, self._at_stop, self.serving, self.serving_arrival = self._at_stop, None, 0, 0
            return [Report(Stopped(begun.version)), begun]
        if self.state is not State.COMMITTED:
            return []
        self.serving, self.serving_arrival = self.version, self.arrival
        self.version, self.arrival, self.state = 0, 0, State.IDLE
        waiting, self._next = self._next, None
        return self.received(waiting) if waiting is not None else []

    # ---- inside

    def _receives(self, arrival: int) -> bool:
        return self.state is State.RECEIVING and arrival == self.arrival

    def _next_arrival(self) -> int:
        self._arrivals += 1
        self.arrival = self._arrivals
        return self.arrival

    def _prepare(self, message: Prepare) -> list[Effect]:
        version = message.version
        if self.state is State.VERIFIED:
            return [Report(Failed(version, f"version {self.version} is in doubt here"))]
        if version <= self.held:
            return [Report(Failed(version, f"version {self.held} is here already"))]
        self._left_out = 0  # Ready reports the boundary
        if self.state is State.COMMITTED:
            self._next = message
            return []
        dropped = self._drop() if self.state is not State.IDLE else []
        self.state, self.version = State.RECEIVING, version
        return [*dropped, *self._begin(Open(version, message.manifest, self._next_arrival()))]

    def _begin(self, effect: Open | Fetch) -> list[Effect]:
        if self._in_place and (self.serving or not self.paused):
            self._at_stop = effect
            return []
        return [effect]

    def _commit(self, version: int) -> None:
        if self.state is State.VERIFIED and version == self.version:
            self.state = State.COMMITTED
        elif version != self.held:
            raise RemoteProtocolError(
                f"commit of version {version}, but this receiver holds {self.held} and is {self.state.value}"
                + (f" with {self.version}" if self.version else "")
            )

    def _abort(self, version: int) -> list[Effect]:
        if isinstance(self._next, Prepare) and self._next.version == version:
            self._next = None
            self._left_out = version
        if self.state in (State.RECEIVING, State.VERIFIED) and version == self.version:
            if self._at_stop is not None:
                self._left_out = version
            elif self.state is State.RECEIVING:  # it may have been left out just before its Ready
                return [*self._drop(), Report(Reached(version))]
            return self._drop()
        return []

    def _catch_up(self, message: CatchUp) -> list[Effect]:
        if self.state in (State.RECEIVING, State.VERIFIED) or message.version <= self.held:
            return []
        if self.state is State.COMMITTED:
            self._next = message
            return []
        if self.state is State.FETCHING and message.version <= self.version:
            return []
        dropped = self._drop() if self.state is State.FETCHING else []
        self.state, self.version = State.FETCHING, message.version
        return [*dropped, *self._begin(Fetch(message.version, message.source, self._next_arrival()))]

    def _drop(self) -> list[Effect]:
        dropped = Discard(self.version, self.arrival)
        self.version, self.arrival, self.state, self._at_stop = 0, 0, State.IDLE, None
        return [dropped]

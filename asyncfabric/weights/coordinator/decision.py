r"""The coordinator of weight updates as a state machine: who must verify, when it is decided. Sans-io.

No clock, no files, no network: events in, effects out, carried out in their order.

    begin -> PREPARING -> all ready, logged -> WRITING -> all verified -> DECIDING -> recorded -> idle, committed
                 \\___________\\_ a failure, a lost sender, no receiver left: idle, aborted

WC-1: a version is decided only when every receiver that is still there has verified it, and at least one has.
WC-2: Commit is sent only after `recorded`. WC-3: versions only grow; an undecided one is an abort (presumed abort).
WC-6: Write is sent only once the beginning is on the disk: a receiver may be in doubt about the version from then on,
and a coordinator that begins anew must know that its number is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from asyncfabric.weights.messages import (
    Abort,
    CatchUp,
    Commit,
    Fetched,
    FromReceiver,
    Prepare,
    Reached,
    Ready,
    Standing,
    Stopped,
    ToReceiver,
    ToSender,
    Verified,
    Write,
)


class Phase(Enum):
    """Where the open update stands."""

    IDLE = "idle"
    PREPARING = "preparing"
    WRITING = "writing"
    DECIDING = "deciding"


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: send a message to a receiver or a sender."""

    to: str
    message: ToReceiver | ToSender


@dataclass(frozen=True, slots=True)
class Decide:
    """Effect: put the decision on the disk, then call `recorded`, or `not_recorded` when that failed."""

    version: int


Effect = Send | Decide


@dataclass
class _Receiver:
    """What is known of a receiver: the complete version that it holds, and what it was asked to fetch."""

    held: int
    in_place: bool = False
    fetching: int = 0
    late: bool = False  # it was left out of an update, and has not reported since that it reached a step boundary


@dataclass
class _Update:
    """The open update: who takes part, and how far each receiver is."""

    version: int
    manifest: str
    senders: frozenset[str]
    ready: dict[str, bool]
    logged: bool
    kept: frozenset[Hashable] = frozenset()  # seats of which somebody held the committed version at the beginning
    verified: set[str] = field(default_factory=set)


class Coordinator:
    """The machine.

    Attributes:
        committed: the latest decided version, 0 for none.
        begun: the latest version that was begun.
        phase: of the open update.
        failure: why the last update that did not succeed was aborted, empty for none.
    """

    def __init__(
        self,
        *,
        begun: int = 0,
        committed: int = 0,
        seat: Callable[[str], Hashable] = lambda receiver: None,
        engine: Callable[[str], Hashable] = lambda receiver: receiver,
        keep: bool = True,
    ) -> None:
        """Begin with what the decision log holds; no receiver and no sender is known.

        Receivers of one `seat` hold the same and can stand in for each other; by default all do. Receivers of one
        `engine` take part in an update together, or are left out of it together; by default each is by itself.
        `keep`: no update may be the end of the committed version, see `endangered`.
        """
        self._seat = seat
        self._engine = engine
        self._keep = keep
        self.begun: int = begun
        self.committed: int = committed
        self.phase: Phase = Phase.IDLE
        self.failure: str = ""
        self._receivers: dict[str, _Receiver] = {}
        self._update: _Update | None = None

    @property
    def receivers(self) -> dict[str, int]:
        """The receivers that are there, and the complete version that each holds."""
        return {name: receiver.held for name, receiver in self._receivers.items()}

    @property
    def awaited(self) -> tuple[str, ...]:
        """The receivers whose next message the open update waits for: what an operator asks when it hangs."""
        if self._update is None:
            return ()
        if self.phase is Phase.PREPARING:
            return tuple(sorted(name for name, ready in self._update.ready.items() if not ready))
        return tuple(sorted(set(self._update.ready) - self._update.verified))

    @property
    def late(self) -> frozenset[str]:
        """The receivers of engines that were left out of an update and have not reached a step boundary since."""
        engines = {self._engine(name) for name, one in self._receivers.items() if one.late}
        return frozenset(name for name in self._receivers if self._engine(name) in engines)

    @property
    def invited(self) -> list[str]:
        """The receivers that the next update would be for: all that are not late, or all where every one is."""
        late = self.late
        return [name for name in self._receivers if name not in late] or list(self._receivers)

    @property
    def endangered(self) -> str:
        """Why an update would be the end of the committed version, before anybody stops for it; empty if it would not.

        Who has room for one version only stops serving it: one receiver of each seat that holds it has to keep it.
        """
        kept = {self._seat(name) for name, one in self._receivers.items() if self._keeps(one) and not one.in_place}
        lost = self._keeping() - kept
        return f"nobody would hold version {self.committed} any more: one receiver needs a shadow" if lost else ""

    @property
    def stoppable(self) -> bool:
        """Whether somebody stops serving for an update, and so is not to be asked before it surely begins."""
        return any(receiver.in_place for receiver in self._receivers.values())

    def begin(self, version: int, manifest: str, senders: Iterable[str], *, logged: bool = True) -> list[Effect]:
        """Open an update to all that are `invited`; unless `logged`, call that when its beginning is on the disk.

        Raises ValueError when an update is open, the version is not later than all before, nobody is there, or nobody
        could keep the committed version meanwhile.
        """
        if self._update is not None:
            raise ValueError(f"version {self._update.version} is still open ({self.phase.value})")
        if version <= self.begun:
            raise ValueError(f"version must be greater than {self.begun}, got {version}")
        wanted = frozenset(senders)
        if not wanted or not self._receivers:
            raise ValueError(f"an update needs senders and receivers, got {len(wanted)} and {len(self._receivers)}")
        if self.endangered:
            raise ValueError(self.endangered)
        self.begun = version
        self.failure = ""
        ready = dict.fromkeys(self.invited, False)
        self._update = _Update(version, manifest, wanted, ready, logged, self._keeping())
        self.phase = Phase.PREPARING
        for name in ready:
            self._receivers[name].late = False
            self._receivers[name].fetching = 0  # who was catching up gets this version instead
        prepare = Prepare(version, manifest)  # one message for all: it is encoded once
        return [Send(name, prepare) for name in self._update.ready]

    def logged(self, version: int) -> list[Effect]:
        """The beginning is on the disk: Write may be sent (WC-6)."""
        if self._update is None or self._update.version != version:
            return []  # aborted meanwhile
        self._update.logged = True
        return self._go_on()

    def received(self, receiver: str, message: FromReceiver) -> list[Effect]:
        """Take a message of a receiver; messages about versions that are not open change nothing."""
        if isinstance(message, Standing):
            return self._stands(receiver, message)
        if isinstance(message, Fetched):
            return self._fetched(receiver, message)
        if isinstance(message, Stopped):
            if receiver in self._receivers:
                self._receivers[receiver].held = 0
            return self._send_elsewhere()
        update = self._update
        if (
            isinstance(message, Reached)
            or update is None
            or (message.version != update.version or receiver not in update.ready)
        ):
            if receiver in self._receivers:
                self._receivers[receiver].late = False  # it is at a step boundary, or was when it was left out
            return self._send_elsewhere()
        if isinstance(message, Ready):
            update.ready[receiver] = True
        elif isinstance(message, Verified):
            update.verified.add(receiver)
        elif self.phase is not Phase.DECIDING:
            return self._abort(f"{receiver}: {message.reason}")
        return self._go_on()

    def leave_out(self, names: Iterable[str], reason: str) -> list[Effect]:
        """Go on without the engines of these receivers, which have not opened their memory.

        They are in no update until they report that they reached a step boundary, and fetch what was decided meanwhile.
        """
        update = self._update
        if update is None or self.phase is not Phase.PREPARING:
            return []
        engines = {self._engine(name) for name in names if update.ready.get(name) is False}
        out = [name for name in update.ready if self._engine(name) in engines]
        for name in out:
            self._receivers[name].late = not update.ready[name]
        if not out:
            return []
        if len(out) == len(update.ready) or update.senders.intersection(out):  # others wait for what those forward
            return self._abort(reason)
        for name in out:
            del update.ready[name]
        abort = Abort(update.version, reason[:2000])
        return [*(Send(name, abort) for name in out), *self._go_on()]

    def sender_failed(self, sender: str, reason: str) -> list[Effect]:
        """Take the failure or the loss of a sender."""
        if self._update is None or sender not in self._update.senders or self.phase is Phase.DECIDING:
            return []
        return self._abort(f"sender {sender}: {reason}")

    def receiver_lost(self, receiver: str, reason: str) -> list[Effect]:
        """Take the loss of a receiver: the update goes on without it, unless it was the last one."""
        self._receivers.pop(receiver, None)
        effects = self._send_elsewhere()
        update = self._update
        if update is None or self.phase is Phase.DECIDING or update.ready.pop(receiver, None) is None:
            return effects
        update.verified.discard(receiver)
        if not update.ready:
            return [*effects, *self._abort(f"no receiver is left; the last one was {receiver}: {reason}")]
        return [*effects, *self._go_on()]

    def recorded(self, version: int) -> list[Effect]:
        """The decision is on the disk: it may be sent."""
        update = self._deciding(version)
        self._update, self.phase, self.committed = None, Phase.IDLE, version
        effects: list[Effect] = []
        commit = Commit(version)
        for name, receiver in self._receivers.items():
            if name in update.verified:
                receiver.held = version
                effects.append(Send(name, commit))
        return effects + self._send_elsewhere()

    def not_recorded(self, version: int, reason: str) -> list[Effect]:
        """The decision could not be put on the disk, and is surely not there."""
        self._deciding(version)
        return self._abort(reason)

    # ---- inside

    def _deciding(self, version: int) -> _Update:
        update = self._update
        if update is None or update.version != version or self.phase is not Phase.DECIDING:
            raise ValueError(f"version {version} does not wait for its record ({self.phase.value})")
        return update

    def _go_on(self) -> list[Effect]:
        update = self._update
        assert update is not None
        if self.phase is Phase.PREPARING and update.logged and all(update.ready.values()):
            if update.kept - self._keeping():
                return self._abort(f"nobody would hold version {self.committed} any more: one receiver needs a shadow")
            self.phase = Phase.WRITING
            write = Write(update.version, sorted(update.ready))
            return [Send(sender, write) for sender in sorted(update.senders)]
        if self.phase is Phase.WRITING and len(update.verified) == len(update.ready):  # who is verified is ready
            self.phase = Phase.DECIDING
            return [Decide(update.version)]
        return []

    def _keeping(self) -> frozenset[Hashable]:
        """Return the seats of which somebody holds the committed version, where one has to."""
        if not self.committed or not self._keep:
            return frozenset()
        return frozenset(self._seat(name) for name, receiver in self._receivers.items() if self._keeps(receiver))

    def _keeps(self, receiver: _Receiver) -> bool:
        return receiver.held == self.committed

    def _abort(self, reason: str) -> list[Effect]:
        update = self._update
        assert update is not None
        self._update, self.phase, self.failure = None, Phase.IDLE, reason[:2000]
        reported = [*sorted(update.senders), *(name for name in update.ready if name in self._receivers)]
        abort = Abort(update.version, self.failure)
        effects: list[Effect] = [Send(name, abort) for name in reported]
        return effects + self._send_elsewhere()

    def _fetched(self, name: str, fetched: Fetched) -> list[Effect]:
        receiver = self._receivers.get(name)
        if receiver is None:
            return []
        if not fetched.reason:
            receiver.held = fetched.version
        if receiver.fetching == fetched.version:
            receiver.fetching = 0
        return self._send_elsewhere()

    def _stands(self, name: str, standing: Standing) -> list[Effect]:
        """A receiver begins a session: messages of an earlier one may be lost, so it leaves the open update."""
        effects: list[Effect] = []
        update, waits = self._update, False
        if update is not None and name in update.ready:
            if self.phase is not Phase.DECIDING:
                effects = self.receiver_lost(name, "it began a new session")
            elif standing.verified == update.version:
                waits = True  # it gets what the record decides
            else:
                update.verified.discard(name)  # another life, or it gave up
        receiver = self._receivers[name] = _Receiver(standing.held, standing.in_place)
        if standing.verified and standing.verified == self.committed:
            receiver.held = self.committed
            effects.append(Send(name, Commit(self.committed)))
        elif standing.verified and not waits:
            effects.append(Send(name, Abort(standing.verified, "it was not decided before the session ended")))
        return effects + self._send_elsewhere()

    def _send_elsewhere(self) -> list[Effect]:
        """Whoever lacks the committed version, and is in no update that would bring a later one, fetches it."""
        if self.committed == 0:
            return []
        holders: dict[Hashable, list[str]] = {}
        for name in sorted(name for name, receiver in self._receivers.items() if receiver.held == self.committed):
            holders.setdefault(self._seat(name), []).append(name)
        effects: list[Effect] = []
        taking_part = self._update.ready if self._update is not None else {}  # gets a later one, or is asked again
        late = self.late  # one rank of an engine must not be a version ahead of one that is at no boundary yet
        behind = [
            (name, receiver)
            for name, receiver in self._receivers.items()
            if receiver.held != self.committed
            and name not in taking_part
            and name not in late
            and receiver.fetching != self.committed
        ]
        for index, (name, receiver) in enumerate(behind):
            if able := holders.get(self._seat(name)):
                receiver.fetching = self.committed
                effects.append(Send(name, CatchUp(self.committed, able[index % len(able)])))
        return effects

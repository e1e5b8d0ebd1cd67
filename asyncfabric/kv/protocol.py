"""The two ends of the protocol as state machines: offer, streaming, cancel, confirmation, loss, fence. Sans-io.

No clock, no fabric, no waiting: events in, messages out. Messages may be lost, doubled and overtake each other, so that
each rule below holds for any order. KV-3: a source that has confirmed never writes for that lease again, also when
the offer arrives after the confirmation. KV-4: the target calls pages reusable only with proof.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

from asyncfabric.kv.messages import (
    KvAccepted,
    KvCancel,
    KvMessage,
    KvOffer,
    KvRefused,
    KvStopped,
)

REMEMBERED = 4096
"""Ended leases that a source remembers of one target; of older ones it only knows that they are older."""

CROWD = 256
"""Targets from which on those without active leases are remembered by one number each."""


class TargetState(Enum):
    """Where a request stands at the leaseholder."""

    STREAMING = "streaming"
    COMPLETE = "complete"
    CANCELLING = "cancelling"
    ENDED = "ended"
    STRANDED = "stranded"


class SourceVerdict(Enum):
    """What the leaseholder knows of one source."""

    MAY_WRITE = "may write"
    STOPPED = "stopped"
    REFUSED = "refused"
    LOST = "lost"


@dataclass
class TargetMachine:
    """The leaseholder's end of one request, with all its sources.

    Attributes:
        target, lease: what the messages name.
        failure: the first thing that went wrong, as text; empty when nothing did (the first cause, SV-1).
        failed_source: the source that it is about.
    """

    target: int
    lease: int
    sources: Iterable[Hashable]
    state: TargetState = TargetState.STREAMING
    failure: str = ""
    failed_source: Hashable = None
    verdicts: dict[Hashable, SourceVerdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Every source may write from the moment its offer is handed to the channel, delivered or not."""
        self.verdicts = dict.fromkeys(self.sources, SourceVerdict.MAY_WRITE)

    @property
    def undecided(self) -> tuple[Hashable, ...]:
        """Sources that may still write and that can still answer."""
        return tuple(each for each, verdict in self.verdicts.items() if verdict is SourceVerdict.MAY_WRITE)

    @property
    def reusable(self) -> bool:
        """Whether no source can write any more, with proof (KV-4)."""
        return self.state in (TargetState.COMPLETE, TargetState.ENDED)

    @property
    def over(self) -> bool:
        """Whether waiting for arrivals is pointless: somebody refused, failed or is lost, or it was cancelled."""
        return self.state is not TargetState.STREAMING or bool(self.failure)

    def receive(self, source: Hashable, message: KvMessage) -> bool:
        """Take a message of a source; returns False for one that this source cannot have sent."""
        if source not in self.verdicts or (message.target, message.lease) != (self.target, self.lease):
            return False
        if isinstance(message, KvRefused):
            self._decide(source, SourceVerdict.REFUSED, message.reason or "refused")
        elif isinstance(message, KvStopped):
            verdict = SourceVerdict.STOPPED if message.clean else SourceVerdict.LOST
            self._decide(source, verdict, message.reason or "the source stopped by itself")
        elif not isinstance(message, KvAccepted):
            return False
        return True

    def complete(self) -> None:
        """Every expected arrival was counted: no source has anything left to write."""
        if self.state in (TargetState.STREAMING, TargetState.CANCELLING, TargetState.STRANDED):
            self.state = TargetState.COMPLETE

    def cancel(self) -> list[tuple[Hashable, KvMessage]]:
        """Begin to cancel; returns what to send to whom. Sending it again is harmless, should a message be lost."""
        if self.state in (TargetState.COMPLETE, TargetState.ENDED):
            return []
        if self.state is TargetState.STREAMING:
            self.state = TargetState.CANCELLING
        self._end_if_decided()
        return [(source, KvCancel(target=self.target, lease=self.lease)) for source in self.undecided]

    def lose(self, source: Hashable, reason: str) -> None:
        """A source is gone, or did not confirm in time: what it may still do is unknown."""
        if source in self.verdicts:
            self._decide(source, SourceVerdict.LOST, reason)

    def spare(self, source: Hashable) -> None:
        """A source's offer was never handed to the channel: it knows of nothing that it could write to."""
        if self.verdicts.get(source) is SourceVerdict.MAY_WRITE:
            self._decide(source, SourceVerdict.STOPPED, "the source was never asked")

    def fenced(self) -> None:
        """Every key that the sources had is dead, and nothing under them can arrive any more."""
        if self.state is not TargetState.COMPLETE:
            if not self.failure and self.state is TargetState.STREAMING:
                self.failure = "the keys of the pool were revoked"
            self.state = TargetState.ENDED

    def _decide(self, source: Hashable, verdict: SourceVerdict, reason: str) -> None:
        before = self.verdicts[source]
        # A confirmation that arrives after all counts more than having given up on it.
        if before in (SourceVerdict.STOPPED, SourceVerdict.REFUSED):
            return
        self.verdicts[source] = verdict
        if self.state is TargetState.STREAMING and not self.failure:
            self.failure, self.failed_source = reason, source
        self._end_if_decided()

    def _end_if_decided(self) -> None:
        if self.state in (TargetState.COMPLETE, TargetState.ENDED) or self.undecided:
            return
        stranded = SourceVerdict.LOST in self.verdicts.values()
        self.state = TargetState.STRANDED if stranded else TargetState.ENDED


class SourceAction(Enum):
    """What the source has to do for a message."""

    NOTHING = "nothing"
    START = "start"
    STOP = "stop"


@dataclass
class _Known:
    """What a source knows of one target's incarnation."""

    active: set[int] = field(default_factory=set)
    stopping: set[int] = field(default_factory=set)
    ended: dict[int, KvStopped] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)  # of the ended: those that wrote everything
    order: list[int] = field(default_factory=list)  # a heap of the ended
    horizon: int = -1  # leases up to here that are not active have ended, or may never begin
    highest: int = -1  # the newest lease that a message named


class SourceMachine:
    """The source's end of all requests. Leases of one target have growing numbers, which bounds what to remember."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        """Know nothing yet; `remembered` ended leases per target are kept by number."""
        self._targets: dict[int, _Known] = {}
        self._horizons: dict[int, int] = {}  # of targets that are remembered by one number
        self._remembered = remembered

    @property
    def active(self) -> tuple[tuple[int, int], ...]:
        """Leases that are being written to, as (target, lease)."""
        return tuple((target, lease) for target, known in self._targets.items() for lease in known.active)

    def receive(self, message: KvMessage) -> tuple[SourceAction, KvMessage | None]:
        """Take a message of its target; returns what to do and what to answer. START must be followed by `ended`."""
        known = self._of(message.target)
        if isinstance(message, KvOffer | KvCancel):
            known.highest = max(known.highest, message.lease)
        if isinstance(message, KvOffer):
            return self._offered(known, message)
        if isinstance(message, KvCancel):
            return self._cancelled(known, message)
        return SourceAction.NOTHING, None

    def ended(self, target: int, lease: int, *, clean: bool, complete: bool, reason: str = "") -> KvStopped | None:
        """A stream has drained. Returns what to send: nothing when all was delivered and nobody asked to stop."""
        known = self._targets[target]
        if lease not in known.active:
            raise ValueError(f"lease {lease} of target {target:x} is not active")
        asked = lease in known.stopping
        known.active.discard(lease)
        known.stopping.discard(lease)
        stopped = KvStopped(target=target, lease=lease, clean=clean, reason="" if asked else reason)
        delivered = complete and clean
        self._remember(known, lease, stopped, delivered=delivered)
        return None if delivered and not asked else stopped

    def lose(self, target: int) -> tuple[int, ...]:
        """A target's incarnation is out of reach: returns its streams, which have to stop.

        Should it come back, only leases that are newer than all that messages named are begun.
        """
        known = self._of(target)
        known.stopping |= known.active
        known.horizon = max(known.horizon, known.highest)
        return tuple(sorted(known.active))

    def _of(self, target: int) -> _Known:
        known = self._targets.get(target)
        if known is None:
            if len(self._targets) >= CROWD:
                for other, idle in [(other, one) for other, one in self._targets.items() if not one.active]:
                    self._horizons[other] = max(idle.horizon, idle.highest)
                    del self._targets[other]
            horizon = self._horizons.pop(target, -1)
            known = self._targets[target] = _Known(horizon=horizon, highest=horizon)
        return known

    def _offered(self, known: _Known, offer: KvOffer) -> tuple[SourceAction, KvMessage | None]:
        if offer.lease in known.active:
            return SourceAction.NOTHING, None  # sent twice
        if offer.lease not in known.ended and offer.lease <= known.horizon:
            reason = f"lease {offer.lease} is older than what this source still remembers; take a new lease"
            return SourceAction.NOTHING, KvStopped(target=offer.target, lease=offer.lease, clean=False, reason=reason)
        if offer.lease in known.ended:
            # The count shows that all was delivered; "stopped" might arrive before the count is looked at.
            silent = offer.lease in known.delivered
            return SourceAction.NOTHING, None if silent else known.ended.get(offer.lease)
        known.active.add(offer.lease)
        return SourceAction.START, KvAccepted(target=offer.target, lease=offer.lease)

    def _cancelled(self, known: _Known, cancel: KvCancel) -> tuple[SourceAction, KvMessage | None]:
        lease = cancel.lease
        if lease in known.active:
            known.stopping.add(lease)
            return SourceAction.STOP, None
        if lease in known.ended:
            return SourceAction.NOTHING, known.ended[lease]
        stopped = KvStopped(target=cancel.target, lease=lease, clean=lease > known.horizon)
        if lease > known.horizon:
            self._remember(known, lease, stopped)  # the offer may come yet: it must find the door closed
        return SourceAction.NOTHING, stopped

    def _remember(self, known: _Known, lease: int, stopped: KvStopped, *, delivered: bool = False) -> None:
        known.ended[lease] = stopped
        if delivered:
            known.delivered.add(lease)
        heappush(known.order, lease)
        while len(known.order) > self._remembered:
            forgotten = heappop(known.order)
            known.ended.pop(forgotten, None)
            known.delivered.discard(forgotten)
            known.horizon = max(known.horizon, forgotten)

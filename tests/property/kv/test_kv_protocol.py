"""Both ends of the protocol under random interleavings: messages lost, doubled, overtaking; cancels, deaths, fences.

Checked after each step: a write lands only in pages that its lease still holds or that are quarantined for it (KV-1),
and no page is lost or doubled (KV-2). At the end everything is free again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.ledger import PageLedger
from asyncfabric.kv.messages import KvMessage, KvOffer, pack_pages
from asyncfabric.kv.protocol import SourceAction, SourceMachine, TargetMachine, TargetState

TARGET = 77
PAGES = 6
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, page_tokens=1, dtype="uint8")


@dataclass
class Stream:
    """A writer at a source: pages by the keys of one generation."""

    lease: int
    pages: tuple[int, ...]
    generation: int
    left: int
    asked: bool = False


@dataclass
class SourceEnd:
    machine: SourceMachine = field(default_factory=lambda: SourceMachine(remembered=2))
    streams: dict[int, Stream] = field(default_factory=dict)
    alive: bool = True


@dataclass
class Lease:
    machine: TargetMachine
    pages: tuple[int, ...]
    released: bool = False
    arrived: int = 0


class Interleavings(RuleBasedStateMachine):
    """One leaseholder, two sources, and a network that does what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(PAGES, 0)
        self.sources = {1: SourceEnd(), 2: SourceEnd()}
        self.leases: dict[int, Lease] = {}
        self.generation = 0
        self.number = 0
        self.to_source: list[tuple[int, KvMessage]] = []
        self.to_target: list[tuple[int, KvMessage]] = []
        self.ghosts: list[Stream] = []  # writes of streams that ended in doubt, or of the dead: still in the air

    # -- the leaseholder

    @precondition(lambda self: self.ledger.free >= 2 and not self.ledger.fencing)
    @rule(both=st.booleans(), which=st.sampled_from([1, 2]))
    def offer(self, both: bool, which: int) -> None:
        number, self.number = self.number, self.number + 1
        pages, _ = self.ledger.hold(number, 2, 0)
        sources = (1, 2) if both else (which,)
        self.leases[number] = Lease(TargetMachine(TARGET, number, sources), tuple(pages.tolist()))
        self.ledger.expose(number)
        for source in sources:
            self.to_source.append((source, self._offer(number, pages)))

    def _offer(self, number: int, pages: Any) -> KvOffer:
        return KvOffer(
            target=TARGET,
            lease=number,
            reply_to=b"",
            layout=LAYOUT,
            digest="",
            tokens=2,
            rotation=self.generation,
            pages=pack_pages(pages),
            pool_pages=PAGES,
            pages_key=b"",
            context_key=b"",
            layer_imms=(1,),
            context_imm=1,
            remaining_ns=1,
        )

    def _proof(self, number: int) -> None:
        """What a pool does when the machine of a lease states that nobody writes any more."""
        lease = self.leases[number]
        if not lease.machine.reusable:
            return
        if lease.released:
            self.ledger.confirm(number)
        elif number in self.ledger.exposed:
            self.ledger.unexpose(number)

    def _streaming(self) -> list[int]:
        return [number for number, one in self.leases.items() if one.machine.state is TargetState.STREAMING]

    @precondition(lambda self: self._streaming())
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        number = data.draw(st.sampled_from(self._streaming()))
        self.to_source += self.leases[number].machine.cancel()
        self._proof(number)

    @precondition(lambda self: any(lease.machine.undecided for lease in self.leases.values()))
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        """A source did not confirm in time, or is thought to be lost."""
        number = data.draw(st.sampled_from(sorted(n for n, one in self.leases.items() if one.machine.undecided)))
        self.leases[number].machine.lose(data.draw(st.sampled_from([1, 2])), "silent")
        self._proof(number)

    @precondition(lambda self: any(not lease.released for lease in self.leases.values()))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(n for n, lease in self.leases.items() if not lease.released)))
        self.leases[number].released = True
        self.ledger.release(number)

    @precondition(lambda self: self.ledger.quarantined and not self.ledger.fencing)
    @rule()
    def fence_begins(self) -> None:
        self.ledger.fence_begin()

    @precondition(lambda self: self.ledger.fencing)
    @rule()
    def fence_ends(self) -> None:
        """From here no write under an old key can land."""
        self.generation += 1
        quarantined = self.ledger.quarantined
        for number in self.ledger.fence_end() | quarantined:
            self.leases[number].machine.fenced()

    @precondition(lambda self: self.to_target)
    @rule(data=st.data(), keep=st.booleans())
    def target_receives(self, data: Any, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_target) - 1))
        source, message = self.to_target[index]
        if not keep:
            del self.to_target[index]
        assert self.leases[message.lease].machine.receive(source, message)
        self._proof(message.lease)

    # -- the sources

    @precondition(lambda self: self.to_source)
    @rule(data=st.data(), keep=st.booleans())
    def source_receives(self, data: Any, keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.to_source) - 1))
        who, message = self.to_source[index]
        if not keep:
            del self.to_source[index]
        source = self.sources[who]
        if not source.alive:
            return
        action, answer = source.machine.receive(message)
        if action is SourceAction.START:
            assert isinstance(message, KvOffer)
            pages = tuple(message.block_table().tolist())
            source.streams[message.lease] = Stream(message.lease, pages, message.rotation, left=2)
        elif action is SourceAction.STOP:
            source.streams[message.lease].asked = True
        if answer is not None:
            self.to_target.append((who, answer))

    def _active(self) -> list[tuple[int, int]]:
        return [(who, n) for who, source in self.sources.items() for n in sorted(source.streams)]

    @precondition(lambda self: self._active())
    @rule(data=st.data())
    def write_lands(self, data: Any) -> None:
        who, number = data.draw(st.sampled_from(self._active()))
        stream = self.sources[who].streams[number]
        if stream.left and self._land(stream):
            stream.left -= 1
            lease = self.leases[number]
            lease.arrived += 1
            if lease.arrived == 2 * len(lease.machine.verdicts):
                lease.machine.complete()
                self._proof(number)

    def _land(self, stream: Stream) -> bool:
        """A write reaches the memory: its pages must not be in use for anything else."""
        if stream.generation != self.generation:
            return False  # refused: its key is dead
        lease = self.leases[stream.lease]
        held = not lease.released and stream.lease in self.ledger.report().holders
        assert held or stream.lease in self.ledger.quarantined, f"lease {stream.lease} was written to after its end"
        assert held is False or stream.lease in self.ledger.exposed, "written to while it was thought to be unexposed"
        return True

    @precondition(lambda self: self._active())
    @rule(data=st.data(), clean=st.booleans())
    def stream_ends(self, data: Any, clean: bool) -> None:
        who, number = data.draw(st.sampled_from(self._active()))
        stream = self.sources[who].streams.pop(number)
        if not clean:
            self.ghosts.append(stream)
        stopped = self.sources[who].machine.ended(
            TARGET, number, clean=clean, complete=stream.left == 0, reason="" if stream.asked else "broken"
        )
        if stopped is not None:
            self.to_target.append((who, stopped))

    @precondition(lambda self: self.ghosts)
    @rule(data=st.data())
    def ghost_lands(self, data: Any) -> None:
        stream = data.draw(st.sampled_from(self.ghosts))
        lease = self.leases[stream.lease]
        if stream.left and lease.machine.state is not TargetState.COMPLETE and self._land(stream):
            stream.left -= 1

    @precondition(lambda self: self.number >= 3)
    @rule(who=st.sampled_from([1, 2]))
    def source_dies(self, who: int) -> None:
        """Its posted writes stay in the air; a new process with a new machine would be another source."""
        source = self.sources[who]
        source.alive = False
        self.ghosts += source.streams.values()
        source.streams.clear()

    @precondition(lambda self: self.number >= 3 and all(source.alive for source in self.sources.values()))
    @rule(who=st.sampled_from([1, 2]))
    def source_thinks_the_target_is_lost(self, who: int) -> None:
        for number in self.sources[who].machine.lose(TARGET):
            self.sources[who].streams[number].asked = True

    # -- what must hold

    @invariant()
    def no_page_is_lost_or_doubled(self) -> None:
        report = self.ledger.report()
        assert report.free + report.held + report.quarantined == PAGES

    def teardown(self) -> None:
        """However it went: giving everything back and one fence free every page."""
        for number, lease in self.leases.items():
            if not lease.released:
                self.ledger.release(number)
        self.ledger.fence_begin()
        self.ledger.fence_end()
        assert self.ledger.report().free == PAGES, "pages leaked"


Interleavings.TestCase.settings = settings(max_examples=120, stateful_step_count=45, deadline=None)
TestInterleavings = pytest.mark.slow(Interleavings.TestCase)

"""Ring 2: however notes, arrivals and withdrawals overtake each other, each note is ready once, and never too early."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from asyncfabric.integrations.nixl.early_notes import EarlyNotes
from asyncfabric.integrations.nixl.notes import Part
from asyncfabric.integrations.nixl.slot_messages import SlotEntry

PEERS = (11, 12)


class Counter:
    """A counter of the target; what comes after its close is stale."""

    def __init__(self, imm: int) -> None:
        self.imm = imm
        self.closed = False
        self._arrivals = 0

    @property
    def counted(self) -> int:
        """Arrivals so far."""
        assert not self.closed, "a closed counter was looked at"
        return self._arrivals

    def arrive(self) -> None:
        """Count one."""
        self._arrivals += not self.closed

    def close(self) -> None:
        """Count nothing more."""
        assert not self.closed, "closed twice"
        self.closed = True


@dataclass(eq=False)
class Moved:
    """One transfer: how many of its arrivals are on their way or lost, and what became of it."""

    number: int
    left: int
    failed: bool = False
    ended: bool = False


@dataclass(eq=False)
class Slot:
    """A slot as its sender has it."""

    peer: int
    entry: SlotEntry
    count: int = 0
    done: int = 0
    moving: Moved | None = None


@dataclass
class World:
    """What is on its way, in no order."""

    notes: list[tuple[int, Part]] = field(default_factory=list)
    withdrawals: list[tuple[int, int, int]] = field(default_factory=list)


class EarlyNotesMachine(RuleBasedStateMachine):
    """Two senders with a few slots each, one target."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[int, Counter] = {}
        self.target = EarlyNotes(self.opened)
        self.slots = [Slot(peer, entry) for peer in PEERS for entry in self.target.grant(peer)[:3]]
        self.world = World()
        self.moves: dict[int, Moved] = {}
        self.taken: list[int] = []
        self.next = 0

    def opened(self) -> Counter:
        """Open the counter of the next imm."""
        counter = Counter(len(self.counters) + 500)
        self.counters[counter.imm] = counter
        return counter

    @rule(data=st.data(), worth=st.integers(1, 3))
    def post(self, data: st.DataObject, worth: int) -> None:
        """Post a noted transfer on a free slot."""
        free = [slot for slot in self.slots if slot.moving is None]
        if not free:
            return
        slot = data.draw(st.sampled_from(free))
        slot.moving = self.moves[self.next] = Moved(self.next, worth)
        slot.count += worth
        self.world.notes.append((slot.peer, Part("a", 0, 1, self.next, slot.entry.number, slot.count, b"")))
        self.next += 1

    @precondition(lambda self: any(slot.moving and slot.moving.left for slot in self.slots))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """Have bytes of a transfer arrive."""
        slot = data.draw(st.sampled_from([one for one in self.slots if one.moving and one.moving.left]))
        assert slot.moving is not None
        slot.moving.left -= 1
        self.counters[slot.entry.value].arrive()

    @rule()
    def end(self) -> None:
        """Have the senders see that transfers have ended well."""
        for slot in self.slots:
            if slot.moving is not None and not slot.moving.left:
                slot.moving.ended, slot.moving = True, None
                slot.done = slot.count

    @precondition(lambda self: any(slot.moving and slot.moving.left for slot in self.slots))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """Have a transfer fail: what has not arrived never does; its slot is withdrawn."""
        slot = data.draw(st.sampled_from([one for one in self.slots if one.moving and one.moving.left]))
        assert slot.moving is not None
        slot.moving.failed = True
        self.slots.remove(slot)
        self.world.withdrawals.append((slot.peer, slot.entry.number, slot.done))

    @precondition(lambda self: self.world.notes)
    @rule(data=st.data())
    def receive_a_note(self, data: st.DataObject) -> None:
        """Have any note on its way come."""
        note = data.draw(st.sampled_from(self.world.notes))
        self.world.notes.remove(note)
        assert self.target.take_in(*note)

    @precondition(lambda self: self.world.withdrawals)
    @rule(data=st.data())
    def receive_a_withdrawal(self, data: st.DataObject) -> None:
        """Have any withdrawal come; the sender gets another slot."""
        withdrawal = data.draw(st.sampled_from(self.world.withdrawals))
        self.world.withdrawals.remove(withdrawal)
        replacement = self.target.withdraw(*withdrawal)
        assert replacement is not None and self.counters[replacement.value].counted == 0
        self.slots.append(Slot(withdrawal[0], replacement))
        assert self.target.withdraw(*withdrawal) is None  # repeated, it does nothing

    @rule()
    def look(self) -> None:
        """Take what is ready: each note once, its bytes all there, its transfer not failed."""
        for _, note in self.target.ready():
            moved = self.moves[note.number]
            assert note.number not in self.taken, "twice"
            assert not moved.failed, "the note of a failed transfer"
            assert not moved.left, "before its bytes"
            self.taken.append(note.number)

    def teardown(self) -> None:
        """Have all that is on its way come: then each note of a transfer that ended well was taken."""
        self.end()
        for note in self.world.notes:
            self.target.take_in(*note)
        self.look()
        for withdrawal in self.world.withdrawals:
            self.target.withdraw(*withdrawal)
        self.look()
        assert {number for number, moved in self.moves.items() if moved.ended} == set(self.taken)
        for peer in PEERS:
            self.target.forget(peer)
        assert not self.target.waiting and all(counter.closed for counter in self.counters.values())


def test_a_withdrawal_drops_no_note_of_an_earlier_transfer() -> None:
    counters: list[Counter] = []

    def opened() -> Counter:
        counters.append(Counter(len(counters)))
        return counters[-1]

    target = EarlyNotes(opened)
    first, second = target.grant(PEERS[0])[:2]
    notes = [
        Part("a", 0, 1, number, slot.number, count, b"")
        for number, (slot, count) in enumerate([(first, 1), (first, 3), (second, 1), (second, 3)])
    ]
    for slot in (first, second):
        counters[slot.value].arrive()  # the transfer before the one that fails has ended; nobody has looked yet
    assert target.take_in(PEERS[0], notes[0]) and target.take_in(PEERS[0], notes[1])
    assert target.withdraw(PEERS[0], first.number, 1) and target.withdraw(PEERS[0], second.number, 1)
    assert target.take_in(PEERS[0], notes[2]) and target.take_in(PEERS[0], notes[3])  # after their withdrawal
    assert [note.number for _, note in target.ready()] == [0, 2]
    assert not target.waiting and not target.take_in(PEERS[1], notes[2])


TestEarlyNotes = EarlyNotesMachine.TestCase
TestEarlyNotes.settings = settings(max_examples=200, stateful_step_count=40)

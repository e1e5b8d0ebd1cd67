"""The machines of the commit, word by word: who is informed of what, and what is refused."""

from __future__ import annotations

import pytest

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.weights.coordinator.decision import Coordinator, Send
from asyncfabric.weights.messages import (
    Abort,
    CatchUp,
    Commit,
    Fetched,
    Prepare,
    Reached,
    Ready,
    Standing,
    Stopped,
    Verified,
)
from asyncfabric.weights.receiver.machine import Discard, Fetch, Open, Receiver, Report, State

SENDER = "trainer"


def test_who_is_ordered_to_catch_up_before_it_flipped_or_while_it_fetches_does_so() -> None:
    """Found by chance: such a word was lost, and the receiver stayed behind until the next update."""
    receiver = Receiver()
    assert receiver.received(CatchUp(1, "a")) == [Fetch(1, "a", 1)]
    assert receiver.received(CatchUp(1, "b")) == []
    assert receiver.received(CatchUp(2, "b")) == [Discard(1, 1), Fetch(2, "b", 2)]
    assert receiver.fetched(2) == [Report(Fetched(2))]
    assert receiver.received(CatchUp(3, "a")) == []
    assert receiver.flip() == [Fetch(3, "a", 3)]
    assert (receiver.serving, receiver.serving_arrival, receiver.state) == (2, 2, State.FETCHING)


def test_an_arrival_that_was_dropped_reports_in_vain() -> None:
    """WC-7: the same version is begun again while the first arrival of it still ends."""
    receiver = Receiver()
    assert receiver.received(CatchUp(1, "a")) == [Fetch(1, "a", 1)]
    assert receiver.received(Prepare(2, "m")) == [Discard(1, 1), Open(2, "m", 2)]
    assert receiver.received(Abort(2, "by choice")) == [Discard(2, 2), Report(Reached(2))]
    assert receiver.received(CatchUp(1, "a")) == [Fetch(1, "a", 3)]
    assert receiver.fetched(1) == receiver.fetched(1, "lost") == receiver.opened(2) == receiver.failed(2, "lost") == []
    assert (receiver.state, receiver.held) == (State.FETCHING, 0)
    assert receiver.fetched(3) == [Report(Fetched(1))]
    assert (receiver.held, receiver.held_arrival) == (1, 3)


def test_a_receiver_in_doubt_receives_the_decision_from_the_next_coordinator() -> None:
    coordinator = Coordinator(begun=7, committed=7)
    assert coordinator.received("a", Standing(held=6, verified=7)) == [Send("a", Commit(7))]
    assert coordinator.received("b", Standing(held=7, verified=8))[0] == Send(
        "b", Abort(8, "it was not decided before the session ended")
    )
    assert coordinator.received("c", Standing(held=0, verified=0)) == [Send("c", CatchUp(7, "a"))]


def test_someone_keeps_the_version_that_is_overwritten_elsewhere() -> None:
    coordinator = Coordinator(begun=1, committed=1)
    for name in ("a", "b"):
        coordinator.received(name, Standing(held=1, verified=0))
    coordinator.begin(2, "m", [SENDER])
    for name in ("a", "b"):
        assert coordinator.received(name, Stopped(2)) == []
    assert coordinator.received("a", Ready(2)) == []
    aborted = coordinator.received("b", Ready(2))
    assert {effect.to for effect in aborted if isinstance(effect, Send) and isinstance(effect.message, Abort)} == {
        "a",
        "b",
        SENDER,
    }
    assert "needs a shadow" in coordinator.failure


def test_a_commit_of_what_is_not_here_is_a_protocol_error() -> None:
    receiver = Receiver(serving=3)
    with pytest.raises(RemoteProtocolError, match="commit of version 4, but this receiver holds 3 and is idle"):
        receiver.received(Commit(4))
    assert receiver.serving == 3


def test_a_receiver_that_overwrote_its_version_for_an_aborted_one_is_brought_up() -> None:
    """Found by chance: the word that the old version is gone comes after the abort."""
    coordinator = Coordinator(begun=1, committed=1)
    for name in ("a", "b"):
        coordinator.received(name, Standing(held=1, verified=0))
    coordinator.begin(2, "m", [SENDER])
    coordinator.sender_failed(SENDER, "by choice")
    assert coordinator.received("a", Stopped(2)) == [Send("a", CatchUp(1, "b"))]
    assert coordinator.receivers == {"a": 0, "b": 1}


def test_an_engine_that_is_left_out_takes_part_again_once_one_of_its_ranks_was_at_a_boundary() -> None:
    coordinator = Coordinator(begun=1, committed=1, seat=lambda name: name[-1], engine=lambda name: name[0])
    for name in ("a0", "a1", "b0", "b1"):
        coordinator.received(name, Standing(held=1, verified=0))
    coordinator.begin(2, "m", [SENDER])
    for name in ("a0", "a1", "b0"):
        assert coordinator.received(name, Ready(2)) == []
    effects = coordinator.leave_out(["b1"], "it is late")
    assert effects[:2] == [Send(name, Abort(2, "it is late")) for name in ("b0", "b1")], "one rank is left out alone"
    assert [effect.to for effect in effects[2:] if isinstance(effect, Send)] == [SENDER]
    for name in ("a0", "a1"):
        decided = coordinator.received(name, Verified(2))
    assert decided and coordinator.recorded(2) == [Send(name, Commit(2)) for name in ("a0", "a1")]
    assert coordinator.late == {"b0", "b1"} and coordinator.invited == ["a0", "a1"]
    assert coordinator.received("b1", Reached(2)) == [Send("b0", CatchUp(2, "a0")), Send("b1", CatchUp(2, "a1"))]
    assert not coordinator.late and coordinator.invited == ["a0", "a1", "b0", "b1"]


def test_a_receiver_reports_the_boundary_that_a_version_had_waited_for() -> None:
    for in_place in (False, True):
        receiver = Receiver(in_place=in_place)
        receiver.received(CatchUp(1, "a"))
        receiver.fetched(1)
        if not in_place:
            receiver.received(Prepare(2, "m"))
        else:
            receiver.flip()
            receiver.received(Prepare(2, "m"))
        receiver.received(Abort(2, "it is late"))
        assert receiver.flip() == [Report(Reached(2))]
        assert receiver.serving == 1 and receiver.flip() == []


def test_memory_that_its_owner_uses_is_opened_only_while_it_is_let_in() -> None:
    receiver = Receiver(in_place=True, paused=False)
    receiver.session_began()
    assert receiver.received(Prepare(1, "m")) == [] and receiver.coming == 1 and not receiver.under_way
    assert receiver.flip() == [Report(Stopped(1)), Open(1, "m", 1)] and receiver.under_way
    receiver.opened(1)
    receiver.verified(1)
    assert receiver.under_way, "the coordinator may decide"
    assert receiver.session_lost() == [] and not receiver.under_way, "nobody is there who would"
    receiver.resume()
    assert receiver.coming == 0
    receiver.session_began()
    assert receiver.received(Commit(1)) == [] and receiver.coming == 1
    assert receiver.flip() == [] and receiver.serving == 1
    receiver.resume()
    assert receiver.received(Prepare(2, "m")) == [] and receiver.coming == 2
    assert receiver.received(Abort(2, "it was late")) == [Discard(2, 2)] and receiver.coming == 2
    assert receiver.flip() == [Report(Reached(2))] and receiver.coming == 0

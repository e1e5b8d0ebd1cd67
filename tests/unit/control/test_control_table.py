"""The session table, one rule at a time: times, refusals, names and keys, credit."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from asyncfabric.control.events import (
    Change,
    Close,
    Deliver,
    Dial,
    DialFailed,
    Emit,
    Leave,
    Path,
    PathLost,
    Received,
    SendParcel,
    Tick,
)
from asyncfabric.control.messages import (
    ENVELOPE_BYTES,
    MAX_FRAME_BYTES,
    Credit,
    Drain,
    Drained,
    Envelope,
    Goodbye,
    Heartbeat,
    Hello,
    Identity,
    Message,
    Parcel,
    SessionRefusal,
    Undecodable,
    Welcome,
    decode,
    encode,
)
from asyncfabric.control.name_table import REMEMBERED, NameTable
from asyncfabric.control.session import SECOND_NS, SessionConfig
from asyncfabric.control.session_table import SessionTable
from asyncfabric.control.window import MAX_CHANNELS, ReceiveWindow, SendWindow, cost_of, largest_body

ME, PEER = Identity("me", 5), Identity("peer", 5)
HELLO = Hello("ipc:///peer", (), 4 * MAX_FRAME_BYTES, MAX_FRAME_BYTES)
WELCOME = Welcome("ipc:///peer", (), 4 * MAX_FRAME_BYTES, MAX_FRAME_BYTES)


class Bench:
    """A table, a clock, and the frames of a peer."""

    def __init__(self, config: SessionConfig | None = None) -> None:
        numbers = itertools.count(100)
        self.table = SessionTable(ME, config, address="ipc:///me", nonce=lambda: next(numbers))
        self.now_ns = 0

    def pass_time_until(self, now_ns: int) -> list[Any]:
        """Tick whenever the table wants it; returns the actions of the last tick."""
        while (due := self.table.next_deadline_ns()) is not None and due < now_ns:
            self.now_ns = due
            self.feed(Tick())
        self.now_ns = now_ns
        return self.feed(Tick())

    def feed(self, event: Any) -> list[Any]:
        return list(self.table.feed(event, self.now_ns))

    def receive(
        self,
        message: Message,
        sequence: int = 0,
        *,
        session: int = 7,
        sender: Identity = PEER,
        path: Path = b"p",
        key: str = "",
    ) -> list[Any]:
        return self.feed(Received(path, encode(Envelope(sender, session, sequence, None, message)), key))

    def ready(self) -> Bench:
        stated = spoken(self.receive(HELLO))
        assert [type(message) for message in stated] == [Welcome]
        return self

    def count(self, reason: str) -> int:
        return self.table.errors.counts[reason]

    @property
    def peers(self) -> list[Identity]:
        return list(self.table.names.peers)


def spoken(actions: list[Any]) -> list[Any]:
    envelopes = [decode(action.frame) for action in actions if isinstance(action, Emit)]
    return [envelope.message for envelope in envelopes if not isinstance(envelope, Undecodable)]


def changes(actions: list[Any]) -> list[tuple[str, str]]:
    return [(action.change.state, action.change.reason) for action in actions if isinstance(action, Change)]


def codes(actions: list[Any]) -> list[str]:
    return [message.code for message in spoken(actions) if isinstance(message, SessionRefusal)]


def test_a_welcome_for_each_hello_is_no_replay_and_one_more_is() -> None:
    """A listener that starts late finds all the Hellos that waited for it."""
    bench = Bench()
    stated = spoken(bench.feed(Dial(1, "ipc:///peer")))
    for _ in range(2):
        bench.now_ns += bench.table.config.heartbeat_ns
        stated += spoken(bench.feed(Tick()))
    assert [type(message) for message in stated] == [Hello] * 3
    for _ in range(3):
        bench.receive(WELCOME, session=100, path=1)
    assert (bench.peers, bench.count("replayed")) == ([PEER], 0)
    bench.receive(WELCOME, session=100, path=1)
    assert bench.count("replayed") == 1


def test_heartbeats_are_sent_in_silence_and_missing_ones_lose_the_peer_at_the_deadline() -> None:
    bench = Bench().ready()
    config = bench.table.config
    assert bench.table.next_deadline_ns() == config.heartbeat_ns
    bench.now_ns = config.heartbeat_ns - 1
    assert bench.feed(Tick()) == []
    bench.now_ns += 1
    assert spoken(bench.feed(Tick())) == [Heartbeat()]
    bench.receive(Heartbeat(), 1)
    end = bench.now_ns + config.peer_deadline_ns
    assert changes(bench.pass_time_until(end - 1)) == []
    lost = bench.pass_time_until(end)
    assert changes(lost) == [("lost", "silent for 5 s")] and Close(b"p") in lost
    assert bench.peers == [] and bench.table.next_deadline_ns() is None


def test_garbage_and_replays_do_not_keep_a_peer_alive() -> None:
    bench = Bench().ready()
    bench.receive(Heartbeat(), 1)
    end = bench.table.config.peer_deadline_ns
    bench.pass_time_until(end - 1)
    bench.receive(Heartbeat(), 1)
    bench.feed(Received(b"p", b"garbage"))
    assert changes(bench.pass_time_until(end))[0][0] == "lost"


def test_who_overslept_blames_nobody() -> None:
    bench = Bench().ready()
    deadline = bench.table.config.peer_deadline_ns
    bench.now_ns = 3 * deadline  # stopped, throttled, or a long call on the event loop
    assert changes(bench.feed(Tick())) == []
    again = bench.now_ns + deadline
    assert changes(bench.pass_time_until(again - 2 * bench.table.config.heartbeat_ns)) == []
    assert changes(bench.pass_time_until(again - bench.table.config.heartbeat_ns))[0][0] == "lost"


def test_a_dial_repeats_its_hello_and_fails_at_its_deadline() -> None:
    bench = Bench()
    assert spoken(bench.feed(Dial(1, "ipc:///peer")))[0].address == "ipc:///me"
    bench.now_ns = SECOND_NS
    assert [type(message) for message in spoken(bench.feed(Tick()))] == [Hello]
    bench.now_ns = bench.table.config.connect_deadline_ns
    assert DialFailed(1, "no answer within 5 s") in bench.feed(Tick())
    assert not bench.table.sessions


def test_a_second_dial_to_a_peer_loses_the_first_session_at_both_ends() -> None:
    """The peer loses it at the second Hello, so what it had sent before does not come any more."""
    bench = Bench()
    bench.feed(Dial(1, "ipc:///peer"))
    bench.receive(WELCOME, session=100, path=1)
    bench.feed(Dial(2, "ipc:///peer"))
    again = bench.receive(WELCOME, session=101, path=2)
    assert [state for state, _ in changes(again)] == ["lost", "ready"]
    assert [action.path for action in again if isinstance(action, Close)] == [1]
    assert bench.receive(Parcel("x", b"late"), 1, session=100, path=1) != [] and bench.count("unknown_session") == 1


def test_dials_that_cross_lose_nothing() -> None:
    bench = Bench().ready()
    bench.feed(Dial(1, "ipc:///peer"))
    assert changes(bench.receive(WELCOME, session=100, path=1)) == []


def test_a_refused_dial_fails_at_once_with_the_reason() -> None:
    bench = Bench()
    bench.feed(Dial(1, "ipc:///peer"))
    actions = bench.receive(SessionRefusal("name_taken", "by another"), session=100, path=1)
    (failed,) = [action for action in actions if isinstance(action, DialFailed)]
    assert "a live peer of this name has another role or another key" in failed.reason
    assert failed.code == "name_taken"


@pytest.mark.parametrize(
    ("message", "sequence", "changed", "reason"),
    [
        (Parcel("x", b""), 1, {"sender": Identity("other", 1)}, "sender"),
        (Parcel("x", b""), 1, {"session": 8}, "unknown_session"),
        (Parcel("x", b""), 1, {"path": b"q"}, "unknown_session"),
        (Parcel("x", b""), 1, {"session": 8, "sender": Identity("peer", 4)}, "retired"),
        (HELLO, 0, {"sender": Identity("other", 1)}, "sender"),
        (HELLO, 0, {"sender": Identity("peer", 4), "path": b"q"}, "retired"),
        (HELLO, 0, {"sender": Identity("me", 9), "path": b"q"}, "own_name"),
        (HELLO, 0, {"sender": Identity("peer", 6), "path": b"q", "key": "other"}, "name_taken"),
        (msgspec.structs.replace(HELLO, role="router"), 0, {"sender": Identity("peer", 6), "path": b"q"}, "name_taken"),
        (msgspec.structs.replace(HELLO, role="a b"), 0, {"sender": Identity("peer", 6), "path": b"q"}, "types"),
        (HELLO, 0, {"sender": Identity("a\x1b[2J", 6), "path": b"q"}, "types"),
        (HELLO, 0, {"sender": Identity("a\n", 6), "path": b"q"}, "types"),
        (HELLO, 0, {"sender": Identity("a" * 65, 6), "path": b"q"}, "types"),
        (HELLO, 0, {"path": b"q"}, "replayed"),
    ],
)
def test_what_is_refused_is_counted_answered_and_leaves_the_session_alone(
    message: Message, sequence: int, changed: dict[str, Any], reason: str
) -> None:
    bench = Bench().ready()
    actions = bench.receive(message, sequence, **changed)
    assert codes(actions) == [reason] and bench.count(reason) == 1
    assert changes(actions) == [] and bench.peers == [PEER]
    assert any(isinstance(action, Deliver) for action in bench.receive(Parcel("x", b"ok"), 1))


@pytest.mark.parametrize(
    ("message", "sequence", "reason"),
    [
        (Parcel("x", b""), 2, "gap"),
        (Credit("x", 1), 1, "credit"),
        (Credit("x", 0), 1, "credit"),
        (Drained(), 1, "unexpected"),
    ],
)
def test_what_breaks_the_session_loses_it_with_the_reason(message: Message, sequence: int, reason: str) -> None:
    bench = Bench().ready()
    actions = bench.receive(message, sequence)
    assert codes(actions) == [reason] and changes(actions)[0][0] == "lost" and bench.peers == []


@pytest.mark.parametrize("room", [{"window_bytes": 0}, {"max_frame_bytes": 2 * ENVELOPE_BYTES - 1}])
def test_who_takes_in_too_little_for_an_answer_gets_no_session(room: dict[str, int]) -> None:
    bench = Bench()
    assert codes(bench.receive(msgspec.structs.replace(HELLO, **room), 0)) == ["types"]
    assert bench.peers == []


def test_names_in_logs_begin_no_line() -> None:
    assert str(Identity("a\n\x1b[2Jb", 16)) == r"'a\n\x1b[2Jb'@10"
    assert str(Identity("né 1", 16)) == "né 1@10"


def test_refusals_are_never_refused() -> None:
    """Else two processes could throw them at each other for ever."""
    bench = Bench().ready()
    for session in (7, 8):
        assert spoken(bench.receive(SessionRefusal("types", "?"), session=session)) == []
    assert spoken(bench.receive(Goodbye("left"), 1, session=8)) == [] and bench.peers == [PEER]
    assert changes(bench.receive(SessionRefusal("unknown_session", "?")))[0][0] == "lost"


def test_answers_are_bounded_in_time_and_counts_are_not() -> None:
    bench = Bench()
    assert sum(len(spoken(bench.feed(Received(b"p", b"garbage")))) for _ in range(1000)) == 64
    assert bench.count("magic") == 1000
    bench.now_ns = SECOND_NS
    assert codes(bench.feed(Received(b"p", b"garbage"))) == ["magic"]


def test_a_lower_incarnation_may_take_a_name_that_nobody_lives_under() -> None:
    """The clock of a machine went back between two starts."""
    bench = Bench().ready()
    bench.feed(PathLost(b"p", "broke"))
    assert changes(bench.receive(HELLO, session=9, sender=Identity("peer", 4)))[0][0] == "ready"
    newer = bench.receive(HELLO, session=10, sender=Identity("peer", 6), path=b"q")
    assert changes(newer)[0] == ("lost", "replaced by peer@6")
    assert codes(bench.receive(HELLO, session=11, sender=Identity("peer", 4), path=b"r")) == ["retired"]
    bench.feed(PathLost(b"q", "broke"))
    assert codes(bench.receive(HELLO, session=12, sender=Identity("peer", 4), path=b"r")) == ["retired"]  # for good


def test_draining_has_two_phases_and_a_deadline() -> None:
    bench = Bench().ready()
    bench.feed(SendParcel(PEER, "x", b"before"))
    assert spoken(bench.feed(Leave(PEER))) == [Drain()]
    with pytest.raises(KeyError):
        bench.table.admits(PEER, "x", 0)
    assert any(isinstance(action, Deliver) for action in bench.receive(Parcel("x", b"on its way"), 1))
    ended = bench.receive(Drained(), 2)
    assert spoken(ended) == [Goodbye("left")] and changes(ended) == [("lost", "left")]
    bench = Bench().ready()
    assert spoken(bench.receive(Drain(), 1)) == [Drained()]
    assert spoken(bench.feed(Leave(PEER))) == []
    bench.now_ns = bench.table.config.drain_deadline_ns
    assert changes(bench.feed(Tick())) == [("lost", "did not drain within 5 s")]


def test_windows_bound_what_is_under_way_on_each_channel() -> None:
    bench = Bench().ready()
    full = largest_body(4 * MAX_FRAME_BYTES)
    assert bench.table.admits(PEER, "x", full)
    body = bytes(MAX_FRAME_BYTES - 3000)
    for _ in range(2):
        bench.feed(SendParcel(PEER, "x", body))
    assert not bench.table.admits(PEER, "x", full) and bench.table.admits(PEER, "y", full)
    assert not codes(bench.receive(Credit("x", 2 * cost_of(len(body))), 1))
    assert bench.table.admits(PEER, "x", full)
    receives = ReceiveWindow(1024)
    assert [receives.arrive(f"{number}", 1) for number in range(MAX_CHANNELS)] == [""] * MAX_CHANNELS
    assert receives.arrive("more", 1) == "channels" and receives.arrive("0", 1024) == "overrun"
    sends = SendWindow(1024)
    sends.send("x", 100)
    assert sends.credit("x", 90) and sends.credit("x", 80) and sends.taken["x"] == 90 and not sends.credit("x", 101)


def test_memories_of_the_dead_are_bounded() -> None:
    names = NameTable(ME)
    for number in range(REMEMBERED + 10):
        names.retire(Identity("n", number))
        assert names.opens(PEER, number)
    assert len(names._retired) == len(names._opened) == REMEMBERED
    assert not names.opens(PEER, REMEMBERED + 9)


def test_bounds_of_the_configuration_state_which_value_is_wrong() -> None:
    for changed, reported in (
        ({"heartbeat_ns": 0}, "heartbeat_ns"),
        ({"peer_deadline_ns": SECOND_NS // 2}, "two heartbeats"),
        ({"max_frame_bytes": 100}, "max_frame_bytes"),
        ({"window_bytes": MAX_FRAME_BYTES}, "window_bytes"),
    ):
        with pytest.raises(ValueError, match=reported):
            SessionConfig(**changed)

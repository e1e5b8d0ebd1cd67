"""Raw ZeroMQ and TCP sockets against a real node: whatever they send is counted, answered, and does no harm."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from processes import Process

from asyncfabric.control import Identity
from asyncfabric.control.handshake import ANSWERS_PER_HEARTBEAT
from asyncfabric.control.keys import LinkKeys
from asyncfabric.control.messages import (
    Envelope,
    Goodbye,
    Hello,
    Parcel,
    SessionRefusal,
    Undecodable,
    Welcome,
    decode,
    encode,
)
from asyncfabric.control.zmq_wire import make_keys

ME = Identity("stranger", 1)
HELLO = Hello("", (), 1 << 22, 1 << 20)
SESSION = 77
HEARTBEAT_S = 0.2


class Stranger:
    """A bare DEALER that sends what it likes, with or without keys."""

    def __init__(self, address: str, public: str = "", secret: str = "", server: str = "") -> None:
        self.context = zmq.Context()
        self.dealer: Any = self.context.socket(zmq.DEALER)
        if public:
            self.dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server))
            self.dealer.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(public))
            self.dealer.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(secret))
        self.events = self.dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self.dealer.connect(address.partition("#")[0])

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.dealer.disable_monitor()
        self.events.close(0)
        self.context.destroy(0)

    def send(self, *frames: bytes) -> None:
        self.dealer.send_multipart(frames)

    def receive(self) -> Any:
        """Return the next message that is no heartbeat."""
        while self.dealer.poll(10_000):
            answer = decode(self.dealer.recv())
            assert not isinstance(answer, Undecodable)
            if type(answer.message).__name__ != "Heartbeat":
                return answer.message
        raise AssertionError("no answer")

    def greet(self, sequence: int = 0, session: int = SESSION, sender: Identity = ME) -> None:
        self.send(encode(Envelope(sender, session, sequence, None, HELLO)))

    def parcel(self, sequence: int, body: bytes = b"", channel: str = "x", sender: Identity = ME) -> None:
        self.send(encode(Envelope(sender, SESSION, sequence, None, Parcel(channel, body))))


@pytest.fixture
def node(tmp_path: Any) -> Iterator[Process]:
    with Process("control_node.py") as process:
        process.send(name="node", bind="ipc", config={"ipc_folder": str(tmp_path / "s"), "heartbeat_s": HEARTBEAT_S})
        yield process
        # Whatever was done to it, it works and ends in good order.
        process.ask("statistics")
        process.close()


@pytest.fixture
def stranger(node: Process) -> Iterator[Stranger]:
    with Stranger(node.receive()["address"]) as found:
        yield found


def errors(node: Process) -> dict[str, int]:
    return dict(node.ask("statistics")["errors"])


@pytest.mark.slow
def test_frames_that_are_none_are_counted_and_answered_by_reason(node: Process, stranger: Stranger) -> None:
    good = encode(Envelope(ME, SESSION, 1, None, Parcel("x", b"")))
    for frame, reason in (
        (b"", "magic"),
        (b"\x00" * 100, "magic"),
        (b"AF\x02" + good[3:], "version"),
        (good[:-3], "malformed"),
        (b"AF\x01" + b"\x91" * 100_000, "types"),
        (good.replace(b"parcel", b"pardon"), "tag"),
        (b"AF\x01\xc0", "types"),
        (good.replace(b"\xa1x", b"\xa0"), "types"),
        (good + b"." * (1 << 20), "oversized"),
        (good, "unknown_session"),
    ):
        stranger.send(frame)
        answer = stranger.receive()
        assert isinstance(answer, SessionRefusal) and answer.code == reason, (frame[:20], answer)
    stranger.send(good, good)
    stranger.send(*[b"x"] * 50)
    stranger.greet()
    assert isinstance(stranger.receive(), Welcome)  # everything before was taken by then
    once = dict.fromkeys(("version", "malformed", "tag", "oversized", "unknown_session"), 1)
    assert errors(node) == {**once, "magic": 2, "types": 3, "parts": 2}


@pytest.mark.slow
def test_replays_gaps_and_forged_senders_in_a_session(node: Process, stranger: Stranger) -> None:
    node.ask("listen", channel="x")
    node.ask("watch")
    stranger.greet()
    assert isinstance(stranger.receive(), Welcome)
    for sequence in (1, 2, 2, 1, 3):
        stranger.parcel(sequence, b"%d" % sequence)
    stranger.parcel(4, b"forged", sender=Identity("node", 1))
    assert stranger.receive().code == "sender"
    stranger.parcel(4, b"4")
    got = node.ask("take", channel="x", count=4)["arrivals"]
    assert [text for _, text in got] == ["1", "2", "3", "4"]
    stranger.parcel(9)
    assert stranger.receive().code == "gap"
    assert "were lost" in node.ask("until", name="stranger", state="lost")["reason"]
    assert errors(node) == {"replayed": 2, "sender": 1, "gap": 1}


@pytest.mark.slow
def test_who_sends_more_than_it_has_credit_for_is_lost(node: Process, stranger: Stranger) -> None:
    node.ask("watch")
    stranger.greet()
    assert isinstance(stranger.receive(), Welcome)
    for sequence in range(1, 6):
        stranger.parcel(sequence, bytes(900_000))  # nobody listens, and a window is 4 MiB
    assert stranger.receive().code == "overrun"
    node.ask("until", name="stranger", state="lost")
    assert isinstance(stranger.receive(), Goodbye)
    stranger.greet()
    assert stranger.receive().code == "replayed"  # the Hello of a session that is over opens none
    stranger.greet(session=SESSION + 1)
    assert isinstance(stranger.receive(), Welcome)
    assert errors(node) == {"overrun": 1, "replayed": 1}


@pytest.mark.slow
def test_a_flood_of_garbage_is_not_answered_frame_by_frame(node: Process, stranger: Stranger) -> None:
    began = time.monotonic()
    for _ in range(3000):
        stranger.send(b"?" + os.urandom(40))  # bare noise has our magic in one frame of 65,536
    stranger.greet()
    answers = 0
    while isinstance(answer := stranger.receive(), SessionRefusal):
        answers += 1
    assert isinstance(answer, Welcome)
    heartbeats = (time.monotonic() - began) / HEARTBEAT_S
    assert errors(node)["magic"] == 3000
    assert answers <= (heartbeats + 2) * ANSWERS_PER_HEARTBEAT


@pytest.mark.slow
def test_a_frame_far_too_large_ends_its_connection_and_nothing_else(node: Process, stranger: Stranger) -> None:
    address = node.ask("about")["address"]
    stranger.send(bytes(5 << 20))
    with Stranger(address) as other:
        other.greet()
        assert isinstance(other.receive(), Welcome)


@pytest.mark.slow
def test_strangers_over_tcp_reach_nothing() -> None:
    keys = LinkKeys(*make_keys())
    with Process("control_node.py") as node:
        node.send(name="node", bind="tcp", keys=[keys.public, keys.secret], trusted=[])
        address = node.receive()["address"]
        host, port = address.removeprefix("tcp://").partition("#")[0].split(":")
        with socket.create_connection((host, int(port))) as raw, contextlib.suppress(ConnectionResetError):
            raw.sendall(os.urandom(2000))
            while raw.recv(1000):
                pass  # libzmq closes the connection
        with Stranger(address, *make_keys(), keys.public) as keyed:
            keyed.greet()
            assert keyed.events.poll(10_000), "nobody reported that the key is not trusted"
        with Stranger(address) as plain:
            plain.greet()
            before = errors(node)["unauthenticated"]
            while errors(node)["unauthenticated"] == before:
                pass  # the node answers each time: this is no busy loop of the node
        statistics = node.ask("statistics")
        assert statistics["ready"] == 0 and list(statistics["errors"]) == ["unauthenticated"]
        node.close()

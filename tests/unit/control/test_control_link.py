"""Links of one process over real sockets: sending, waiting for room, listening, watching, leaving, refusals."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import zmq

from asyncfabric.control import Identity, Link, LinkConfig, LinkKeys, make_keys, open_link, zmq_wire
from asyncfabric.control.ipc_folder import sweep
from asyncfabric.control.keys import ANY_ROLE
from asyncfabric.errors import BusyError, ClosedError, DeviceError, PeerError

pytestmark = pytest.mark.anyio
SMALL = {"max_frame_bytes": 8192, "window_bytes": 16384, "listener_frames": 1}
BODY = b"." * 5000  # three fill a window


@pytest.fixture
def config(tmp_path: Path) -> LinkConfig:
    return LinkConfig(ipc_folder=str(tmp_path / "s"), **SMALL)


def key_pairs(count: int, *, trusting: bool = True) -> list[LinkKeys]:
    pairs = [make_keys() for _ in range(count)]
    trusted = {public: ANY_ROLE for public, _ in pairs} if trusting else {}
    return [LinkKeys(public, secret, trusted) for public, secret in pairs]


@asynccontextmanager
async def open_two(config: LinkConfig, bind: str = "ipc", **options: Any) -> AsyncIterator[tuple[Link, Link]]:
    keys = key_pairs(2) if bind == "tcp" and not options else [None, None]
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(open_link("a", bind=bind, keys=keys[0], config=config, **options)),
            await stack.enter_async_context(open_link("b", bind=bind, keys=keys[1], config=config, **options)),
        )


@pytest.mark.parametrize("bind", ["ipc", "tcp"])
async def test_bodies_arrive_in_order_both_ways_with_their_trace(config: LinkConfig, bind: str) -> None:
    async with open_two(config, bind) as (a, b):
        assert await a.connect(b.address) == b.identity
        async with b.listen("there") as there, a.listen("back") as back, anyio.create_task_group() as tasks:
            tasks.start_soon(echo, b, there, 200)
            for number in range(200):
                await a.send(b.identity, "there", b"%d" % number, f"00-{number}")
                arrival = await back.receive()
                assert (arrival.sender, arrival.body) == (b.identity, b"%d" % number)
                assert arrival.trace == f"00-{number}"
        assert not any(a.statistics().protocol_errors.values()) and not any(b.statistics().protocol_errors.values())


async def echo(link: Link, arrivals: Any, count: int) -> None:
    for _ in range(count):
        arrival = await arrivals.receive()
        await link.send(arrival.sender, "back", arrival.body, arrival.trace)


async def test_a_full_channel_makes_its_senders_wait_and_nobody_else(config: LinkConfig) -> None:
    async with open_two(config) as (a, b):
        await a.connect(b.address)
        sent: list[int] = []

        async def pour() -> None:
            for number in range(20):
                await a.send(b.identity, "slow", number.to_bytes(2, "big") + BODY)
                sent.append(number)

        async with b.listen("slow") as slow, b.listen("fast") as fast, anyio.create_task_group() as tasks:
            tasks.start_soon(pour)
            for number in range(50):  # ten windows of another channel pass meanwhile
                await a.send(b.identity, "fast", number.to_bytes(2, "big") + BODY)
                assert (await fast.receive()).body[:2] == number.to_bytes(2, "big")
            stuck = len(sent)
            assert stuck < 8, "a listener that takes nothing has made nobody wait"
            with anyio.CancelScope() as scope:
                scope.cancel()
                await a.send(b.identity, "slow", b"never")
            got = [int.from_bytes((await slow.receive()).body[:2], "big") for _ in range(20)]
        assert got == list(range(20)) == sent
        assert b.statistics().waiting_arrivals == 0


async def test_a_cancelled_send_that_waited_sent_nothing(config: LinkConfig) -> None:
    async with open_two(config) as (a, b):
        await a.connect(b.address)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_until_cancelled, a, b.identity)
            while b.statistics().waiting_arrivals < 3:  # nobody listens: the window fills
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        async with b.listen("slow") as slow:
            assert [(await slow.receive()).body[:1] for _ in range(3)] == [b"."] * 3
            await a.send(b.identity, "slow", b"next")
            assert (await slow.receive()).body == b"next"


async def send_until_cancelled(link: Link, to: Identity) -> None:
    while True:
        await link.send(to, "slow", BODY)


async def test_a_lost_session_frees_its_waiting_senders(config: LinkConfig) -> None:
    async with open_link("a", config=config) as a:
        async with open_link("b", config=config) as b:
            await a.connect(b.address)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send_until_refused, a, b.identity)
                while b.statistics().waiting_arrivals < 3:
                    await anyio.lowlevel.checkpoint()
                await b.disconnect(a.identity)
        with pytest.raises(PeerError, match=r"b@\w+: (left|it is draining)"):
            await a.send(b.identity, "slow", b"x")
        with pytest.raises(PeerError, match="connect first"):
            await a.send(Identity("nobody", 1), "slow", b"x")


async def send_until_refused(link: Link, to: Identity) -> None:
    with pytest.raises(PeerError):
        await send_until_cancelled(link, to)


async def test_leaving_delivers_what_was_sent_before(config: LinkConfig) -> None:
    async with open_two(config) as (a, b):
        await a.connect(b.address)
        async with b.listen("x") as arrivals, b.watch() as changes:
            for number in range(50):
                await a.send(b.identity, "x", b"%d" % number)
                if number % 2:
                    await arrivals.receive()
            await a.disconnect(b.identity)
            await a.disconnect(b.identity)  # a second time there is nothing to do
            rest = [await arrivals.receive() for _ in range(25)]
            assert rest[-1].body == b"49"
            assert [(await changes.receive()).state for _ in range(2)][-1] in ("draining", "lost")
        assert a.statistics().peers_ready == b.statistics().peers_ready == 0


async def test_what_a_listener_did_not_take_waits_for_the_next(config: LinkConfig) -> None:
    async with open_two(config) as (a, b):
        await a.connect(b.address)
        for number in range(6):
            await a.send(b.identity, "x", b"%d" % number)
        got = []
        for _ in range(3):
            async with b.listen("x") as arrivals:
                got += [(await arrivals.receive()).body for _ in range(2)]
                with pytest.raises(BusyError, match="'x' has a listener"):
                    async with b.listen("x"):
                        pass
        assert got == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_any_number_of_connects_makes_one_session(config: LinkConfig) -> None:
    async with open_two(config) as (a, b), a.watch() as changes:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(a.connect, b.address)
                tasks.start_soon(b.connect, a.address)
        assert a.statistics().peers_ready == b.statistics().peers_ready == 1
        assert (await changes.receive()).state == "ready"
        async with a.listen("x") as at_a, b.listen("x") as at_b:
            for number in range(20):
                await a.send(b.identity, "x", b"%d" % number)
                await b.send(a.identity, "x", b"%d" % number)
                assert (await at_a.receive()).body == (await at_b.receive()).body == b"%d" % number
        await a.disconnect(b.identity)
        while b.statistics().peers_lost == 0:
            await anyio.lowlevel.checkpoint()
        assert b.statistics().peers_ready + b.statistics().peers_draining == 0


@pytest.mark.slow
async def test_all_connect_to_all_at_once(config: LinkConfig) -> None:
    async with AsyncExitStack() as stack:
        links = [await stack.enter_async_context(open_link(f"n{number}", config=config)) for number in range(6)]
        boxes = [await stack.enter_async_context(link.listen("x")) for link in links]
        async with anyio.create_task_group() as tasks:
            for a in links:
                for b in links:
                    tasks.start_soon(a.connect, b.address)
        for a in links:
            for b in links:
                if a is not b:
                    await a.send(b.identity, "x", a.identity.name.encode())
        for link, box in zip(links, boxes, strict=True):
            senders = {(await box.receive()).sender for _ in range(5)}
            assert senders == {other.identity for other in links if other is not link}
            statistics = link.statistics()
            assert (statistics.peers_ready, statistics.peers_lost) == (5, 0)
            assert not any(statistics.protocol_errors.values())


async def test_sends_to_our_own_address_arrive_here_and_wait_for_room(config: LinkConfig) -> None:
    async with open_link("a", config=config) as a, a.listen("x") as arrivals, anyio.create_task_group() as tasks:
        assert await a.connect(a.address) == a.identity
        tasks.start_soon(send_numbers, a, a.identity, 30)
        for number in range(30):
            assert (await arrivals.receive()).body[:1] == bytes([number])


async def send_numbers(link: Link, to: Identity, count: int) -> None:
    for number in range(count):
        await link.send(to, "x", bytes([number]) + BODY)


async def test_a_key_that_is_not_trusted_is_refused_on_either_side(config: LinkConfig) -> None:
    a_keys, b_keys = key_pairs(2, trusting=False)
    knows_b = LinkKeys(a_keys.public, a_keys.secret, {b_keys.public: ANY_ROLE})
    async with open_link("b", bind="tcp", keys=b_keys, config=config) as b:
        async with open_link("a", bind="tcp", keys=a_keys, config=config) as a:
            with pytest.raises(PeerError, match=r"not trusted here.*keys trust"):
                await a.connect(b.address)
        async with open_link("a", bind="tcp", keys=knows_b, config=config) as a:
            with pytest.raises(PeerError, match="does not trust our key"):
                await a.connect(b.address)
        assert b.statistics().protocol_errors["unauthenticated"] == 1
        assert b.statistics().frames_received == 0


async def test_plain_tcp_must_be_asked_for_and_warns(config: LinkConfig, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="insecure=True"):
        await open_link("a", bind="tcp", config=config).__aenter__()
    with caplog.at_level(logging.WARNING, "asyncfabric.control"):
        async with open_two(config, "tcp", insecure=True) as (a, b):
            assert "PLAIN TCP" in caplog.text and b.address.endswith("#insecure")
            assert await a.connect(b.address) == b.identity
            async with open_link("c", config=config) as c:
                with pytest.raises(PeerError, match="plain TCP"):
                    await c.connect(b.address)


@pytest.mark.slow
async def test_nobody_there_is_reported_with_the_reason(config: LinkConfig, tmp_path: Path) -> None:
    hasty = LinkConfig(ipc_folder=config.ipc_folder, connect_deadline_s=0.2)
    async with open_link("a", config=hasty) as a:
        with pytest.raises(PeerError, match=r"no answer within 0\.2 s \(nobody listens there\)"):
            await a.connect(f"ipc://{tmp_path}/none.sock")


async def test_a_peer_with_our_own_name_is_refused(config: LinkConfig) -> None:
    async with open_link("a", config=config) as first, open_link("a", config=config) as second:
        with pytest.raises(PeerError, match="has the name of this process"):
            await second.connect(first.address)
        assert first.statistics().protocol_errors["own_name"] == 1


async def test_a_later_start_replaces_the_one_before(config: LinkConfig) -> None:
    async with open_two(config) as (a, b):
        await a.connect(b.address)
        async with open_link("a", config=config) as later, b.watch() as changes, a.watch() as noticed:
            await later.connect(b.address)
            seen = [await changes.receive() for _ in range(3)]
            assert [(change.peer, change.state) for change in seen] == [
                (a.identity, "ready"), (a.identity, "lost"), (later.identity, "ready"),
            ]  # fmt: skip
            assert seen[1].reason == f"replaced by {later.identity}"
            while (await noticed.receive()).state != "lost":
                pass
            with pytest.raises(PeerError, match="earlier incarnation"):
                await a.connect(b.address)
            assert b.statistics().peers_ready == 1
            async with b.listen("x") as arrivals:
                await later.send(b.identity, "x", b"new")
                assert (await arrivals.receive()).sender == later.identity


async def test_misuse_raises_at_the_call(config: LinkConfig) -> None:
    for bind, reported in (("udp", "bind must be"), ("tcp://*:0", "needs keys"), ("ipc:///" + "x" * 200 + "/a", "107")):
        with pytest.raises((ValueError, DeviceError), match=reported):
            await open_link("a", bind=bind, config=config).__aenter__()
    with pytest.raises(ValueError, match="advertise_host"):
        await open_link("a", bind="tcp://*:0", keys=key_pairs(1)[0], config=config).__aenter__()
    with pytest.raises(ValueError, match=r"1\.\.64"):
        await open_link("", config=config).__aenter__()
    async with open_two(config) as (a, b):
        await a.connect(b.address)
        for error, reported, arguments in (
            (TypeError, "Identity", ("b", "x", b"")),
            (TypeError, "bytes", (b.identity, "x", "text")),
            (ValueError, r"1\.\.128", (b.identity, "", b"")),
            (ValueError, "takes 6144", (b.identity, "x", b"." * 6145)),
            (ValueError, "trace", (b.identity, "x", b"", "")),
        ):
            with pytest.raises(error, match=reported):
                await a.send(*arguments)  # type: ignore[arg-type]
        await a.send(b.identity, "x", b"." * 6144)
        for address in ("nonsense", "tcp://h:1", "ipc:///a#curve=" + "0" * 64, "tcp://h:1#curve=xyz"):
            with pytest.raises(ValueError, match="tcp"):
                await a.connect(address)
        for number in range(63):
            await a.send(b.identity, f"channel {number}", b"")
        with pytest.raises(ValueError, match="takes 64"):
            await a.send(b.identity, "one too many", b"")
    with pytest.raises(ClosedError):
        await a.send(b.identity, "x", b"")
    with pytest.raises(ClosedError):
        a.listen("x")


async def test_errors_of_the_caller_come_out_as_they_are(config: LinkConfig) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_two(config) as (a, b):
            await a.connect(b.address)
            raise KeyError("mine")


async def test_ipc_folders_of_others_are_refused_and_dead_sockets_are_swept(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o755)
    with pytest.raises(DeviceError, match=r"mode 0755.*chmod 700"):
        await open_link("a", config=LinkConfig(ipc_folder=str(folder))).__aenter__()
    folder.chmod(0o700)
    dead = folder / f"gone-{2**22 + 1}-1f.sock"  # no process has so high a number
    dead.touch()
    async with open_link("a", config=LinkConfig(ipc_folder=str(folder))) as a:
        assert not dead.exists()
        alive = Path(a.address.removeprefix("ipc://"))
        assert sweep(folder) == [] and alive.name in os.listdir(folder)
        with pytest.raises(DeviceError, match="somebody listens"):
            await open_link("b", bind=a.address).__aenter__()
    assert list(folder.iterdir()) == []


async def test_a_link_that_is_cancelled_leaves_in_good_order(config: LinkConfig) -> None:
    async with open_link("b", config=config) as b, b.watch() as changes:
        with anyio.CancelScope() as scope:
            async with open_link("a", config=config) as a:
                await a.connect(b.address)
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        states = [await changes.receive() for _ in range(3)]
        assert [(change.peer, change.state) for change in states] == [
            (a.identity, "ready"),
            (a.identity, "draining"),
            (a.identity, "lost"),
        ]
        assert states[-1].reason == "left"


async def test_a_link_closes_also_when_zeromq_does_not_end(
    config: LinkConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen in processes that others stopped now and then; a socket that is left open does the same."""
    monkeypatch.setattr(zmq_wire, "END_S", 0.3)
    with anyio.fail_after(10.0), caplog.at_level(logging.WARNING, "asyncfabric.control"):
        async with open_link("a", bind="ipc", config=config) as link:
            left = link._board.wire.context.socket(zmq.PAIR)  # type: ignore[attr-defined]
        left.close(0)  # lets the thread go
    assert "ZeroMQ did not end within 0.3 s" in caplog.text
    caplog.clear()
    async with open_link("b", bind="ipc", config=config):
        pass
    assert not caplog.records


async def test_an_address_that_cannot_be_dialed_leaves_no_socket_open(
    config: LinkConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The error holds what its frames hold, and it leaves the link: an open socket would be waited for."""
    with caplog.at_level(logging.WARNING, "asyncfabric.control"), pytest.raises(PeerError, match="cannot dial"):
        async with open_link("a", bind="ipc", config=config) as link:
            await link.connect("ipc:///" + "x" * 200)  # longer than a path of a socket can be
    assert not caplog.records


STAYS = """
import sys, anyio, zmq
from asyncfabric.control import LinkConfig, open_link, zmq_wire

zmq_wire.END_S = 0.1

async def main():
    global left
    async with open_link("a", config=LinkConfig(ipc_folder=sys.argv[2])) as link:
        left = link._board.wire.context.socket(zmq.PAIR)

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.slow
def test_a_process_ends_also_when_zeromq_does_not(anyio_backend_name: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", STAYS, anyio_backend_name, str(tmp_path / "s")]
    ended = subprocess.run(program, timeout=60, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "ZeroMQ did not end" in ended.stderr

"""Peers that die, stop or come back in the middle of a transfer: the others learn it in time and lose nothing else."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
from availability import need
from processes import LOOK_S, PATIENCE, nothing_is_kept, party

KIB, MIB = 1 << 10, 1 << 20
HOST_DEADLINE = 1.0
SLACK = 1.5  # two shared cores: the deadline is the engine's, the slack is the machine's


@pytest.mark.parametrize("rail", ["local", "tcp", "verbs", "fault+local?reorder=16&delay_us=200"])
def test_target_killed_mid_transfer(rail: str) -> None:
    need(rail)
    with party(rail, peer_deadline_network=2.0) as writer, party(rail) as target, party(rail) as other:
        for one in (writer, target, other):
            one.receive()
        key = target.ask("expose", length=8 * MIB)["key"]
        elsewhere = other.ask("expose", length=MIB)["key"]
        imm = other.ask("counter")["imm"]
        writer.ask("expose", length=MIB, name="source", seed=1)
        writer.ask("write", key=elsewhere, length=MIB, imm=imm)
        writer.send(do="stream", key=key, piece=MIB)
        assert writer.receive() == {"streaming": True}
        killed = target.send_signal(signal.SIGKILL)
        error = writer.receive()
        assert error["error"] == "PeerError", error
        deadline = 2.0 if rail == "tcp" else HOST_DEADLINE
        assert error["at"] - killed < deadline + SLACK, error
        again = writer.fail("write", key=key, length=MIB)
        assert again["error"] in ("PeerError", "StaleKeyError"), again
        writer.ask("write", key=elsewhere, length=MIB, imm=imm)
        assert other.ask("wait", imm=imm, value=2)["value"] == 2
        writer.close()
        other.close()


@pytest.mark.parametrize("rail", ["local", "tcp", "verbs"])
def test_writer_killed_while_the_target_waits(rail: str) -> None:
    """Waiters that named the dead peer fail by name; the memory of the target is usable, its other peers go on."""
    need(rail)
    with party(rail) as writer, party(rail, peer_deadline_network=2.0) as target, party(rail) as other:
        address = writer.receive()["address"]
        home = target.receive()["address"]
        other.receive()
        key = target.ask("expose", length=8 * MIB)["key"]
        imm = target.ask("counter")["imm"]
        writer.ask("expose", length=MIB, name="source", seed=1)
        writer.ask("connect", address=home)
        target.ask("connect", address=address)
        target.send(do="wait", imm=imm, value=1 << 40, address=address)
        writer.send(do="stream", key=key, piece=MIB, imm=imm)
        assert writer.receive() == {"streaming": True}
        killed = writer.send_signal(signal.SIGKILL)
        error = target.receive()
        assert error["error"] == "PeerError", error
        assert error["at"] - killed < (2.0 if rail == "tcp" else HOST_DEADLINE) + SLACK
        before = target.ask("value", imm=imm)["value"]
        other.ask("signal", address=home, imm=imm)
        assert target.ask("wait", imm=imm, value=before + 1)["value"] == before + 1
        other.close()
        target.close()


def test_stopped_peer() -> None:
    """SIGSTOP: the peer is alive and silent. Transfers to it end within the deadline."""
    rail = "tcp"
    need(rail)
    with party(rail, peer_deadline_network=2.0, drain_deadline=2.0) as writer, party(rail) as target:
        writer.receive(), target.receive()
        key = target.ask("expose", length=8 * MIB)["key"]
        writer.ask("expose", length=MIB, name="source", seed=1)
        writer.send(do="stream", key=key, piece=MIB)
        assert writer.receive() == {"streaming": True}
        stopped = target.send_signal(signal.SIGSTOP)
        error = writer.receive()
        assert error["error"] == "PeerError", error
        assert error["at"] - stopped < 2.0 + SLACK, error
        target.send_signal(signal.SIGCONT)
        writer.close()


@pytest.mark.parametrize("rail", ["tcp", "verbs"])
def test_who_was_stopped_itself_blames_nobody(rail: str) -> None:
    """A throttled container, a paused machine: its own absence is not the silence of its peers."""
    need(rail)
    deadline = 4.0
    limits = {"peer_deadline_network": deadline, "peer_deadline_host": deadline, "drain_deadline": 60.0}
    with party(rail, **limits) as writer, party(rail) as target:
        writer.receive(), target.receive()
        key = target.ask("expose", length=64 * MIB)["key"]
        imm = target.ask("counter")["imm"]
        writer.ask("expose", length=16 * MIB, name="source", seed=1)
        writer.ask("write", key=key, length=MIB, imm=imm)
        target.send_signal(signal.SIGSTOP)  # what follows is more than sockets hold, so it waits for the target
        writer.ask("submit", key=key, piece=16 * MIB, count=4, imm=imm)
        time.sleep(deadline / 2)  # it looks and receives nothing; time itself is what this is about
        writer.send_signal(signal.SIGSTOP)
        time.sleep(deadline)
        writer.send_signal(signal.SIGCONT)
        writer.ask("expose", length=64, name="awake")
        target.send_signal(signal.SIGCONT)
        assert target.ask("wait", imm=imm, value=5)["value"] == 5
        writer.ask("write", key=key, length=MIB, imm=imm)
        writer.close()
        target.close()


@pytest.mark.parametrize("rail", ["tcp", "local", "verbs"])
def test_who_lost_the_other_alone_begins_anew_with_it(rail: str) -> None:
    """One end calls the other dead, which knows nothing of it: both begin anew, and nothing hangs."""
    need(rail)
    hasty = {"peer_deadline_network": 1.0, "peer_deadline_host": 1.0, "drain_deadline": 2.0}
    patient = {"peer_deadline_network": 60.0, "peer_deadline_host": 60.0}
    with party(rail, **hasty) as writer, party(rail, **patient) as target:
        home, address = writer.receive()["address"], target.receive()["address"]
        key = target.ask("expose", length=64 * MIB)["key"]
        imm = target.ask("counter")["imm"]
        writer.ask("expose", length=64 * MIB, name="source", seed=1)
        for text in ("one", "two"):
            writer.ask("send", address=address, text=text)
            assert target.ask("receive")["text"] == text
        target.send_signal(signal.SIGSTOP)
        os.waitpid(target.child.pid, os.WUNTRACED)  # a `local` peer that has shown its key is needed for nothing more
        writer.send(do="stream", key=key, piece=8 * MIB)
        lost = writer.receive()
        while "error" not in lost:
            lost = writer.receive()
        assert lost["error"] == "PeerError", lost
        target.send_signal(signal.SIGCONT)
        writer.ask("connect", address=address)
        writer.ask("send", address=address, text="three")
        assert target.ask("receive")["text"] == "three"
        writer.ask("write", key=key, length=MIB, imm=imm)
        assert target.ask("wait", imm=imm, value=1)["value"] == 1
        target.ask("send", address=home, text="four")
        assert writer.ask("receive")["text"] == "four"
        writer.close()
        target.close()


def test_who_waits_for_a_stopped_writer_is_alive_for_the_others() -> None:
    """A release over tcp waits for the word of each writer; meanwhile the engine goes on with everybody else.

    It ends the connection of one that stands still, which connects again when it goes on.
    """
    need("tcp")
    with (
        party("tcp", peer_deadline_host=60.0, drain_deadline=30.0) as target,
        party("tcp") as writer,
        party("tcp", peer_deadline_host=2.0) as other,
    ):
        address, _, home = (one.receive()["address"] for one in (target, writer, other))
        key = target.ask("expose", length=MIB)["key"]
        writer.ask("expose", length=MIB, name="source", seed=1)
        writer.ask("write", key=key, length=MIB)
        imm = other.ask("counter")["imm"]
        target.ask("connect", address=home)
        other.send(do="wait", imm=imm, value=1, address=address)  # fails by name when it loses the target
        writer.send_signal(signal.SIGSTOP)
        os.waitpid(writer.child.pid, os.WUNTRACED)
        target.ask("release")
        key = target.ask("expose", length=MIB)["key"]
        target.ask("signal", address=home, imm=imm)
        assert other.receive() == {"value": 1}
        writer.send_signal(signal.SIGCONT)
        writer.send(do="write", key=key, length=MIB)
        answer = writer.receive()
        if answer.get("error") == "TransferError":  # it was written into the connection that had ended
            answer = writer.ask("write", key=key, length=MIB)
        assert "error" not in answer, answer
        for one in (other, target, writer):
            one.close()


def test_a_new_key_leads_to_who_was_stopped_and_given_up() -> None:
    """The target closes a counter, and the writer, which stands still, does not confirm it: the target gives it up.

    Both live. Old keys of the target stay dead at the writer, and one that comes after it goes on connects again.
    """
    need("local")
    with party("local") as writer, party("local", peer_deadline_host=0.5) as target:
        writer.receive(), target.receive()
        key = target.ask("expose", length=MIB)["key"]
        writer.ask("expose", length=MIB, name="source", seed=1)
        imm = target.ask("counter")["imm"]
        writer.ask("write", key=key, length=MIB, imm=imm)
        target.ask("wait", imm=imm, value=1)
        writer.send_signal(signal.SIGSTOP)
        os.waitpid(writer.child.pid, os.WUNTRACED)
        target.ask("close_counter", imm=imm)
        opened = {"error": "BusyError"}
        while "error" in opened:  # until the loss of the writer confirms the close
            assert opened["error"] == "BusyError", opened
            time.sleep(0.05)
            target.send(do="counter", imm=imm)
            opened = target.receive()
        writer.send_signal(signal.SIGCONT)
        lost: dict[str, Any] = {}
        while "error" not in lost:  # until it knows
            writer.send(do="write", key=key, length=MIB)
            lost = writer.receive()
        assert lost["error"] == "PeerError", lost
        for number in (1, 2):
            key = target.ask("expose", length=MIB)["key"]
            writer.ask("write", key=key, length=MIB, imm=imm)
            assert target.ask("wait", imm=imm, value=number)["value"] == number
        writer.close()
        target.close()


def test_stopped_peer_of_one_host() -> None:
    """Local writes need nothing from a stopped peer but room for their counts: none is lost."""
    need("local")
    with party("local", peer_deadline_host=20.0) as writer, party("local") as target:
        writer.receive(), target.receive()
        key = target.ask("expose", length=8 * MIB)["key"]
        imm = target.ask("counter")["imm"]
        writer.ask("expose", length=MIB, name="source", seed=1)
        writer.ask("write", key=key, length=MIB, imm=imm)
        target.ask("wait", imm=imm, value=1)
        target.send_signal(signal.SIGSTOP)
        writer.ask("submit", key=key, piece=64, count=15_000, imm=imm)
        target.send_signal(signal.SIGCONT)
        assert target.ask("wait", imm=imm, value=15_001)["value"] == 15_001
        writer.close()
        target.close()


def test_dead_peer_that_swallows_everything() -> None:
    """The provider sees its peer alive, but nothing is answered: heartbeats find out, and only this peer is lost."""
    need("local")
    with party("fault+local?dead_peer_after=20") as writer, party("fault+local") as target:
        writer.receive(), target.receive()
        key = target.ask("expose", length=8 * MIB)["key"]
        writer.ask("expose", length=MIB, name="source", seed=1)
        started = time.monotonic()
        writer.send(do="stream", key=key, piece=4096)
        assert writer.receive() == {"streaming": True}
        error = writer.receive()
        assert error["error"] == "PeerError", error
        assert error["at"] - started < HOST_DEADLINE + SLACK
        writer.close()


def test_interrupt_drains_before_the_program_ends() -> None:
    """SIGINT in the middle of transfers: KeyboardInterrupt leaves `open_fabric` only when nothing reads the source."""
    need("local")
    from processes import Process

    with party("fault+local") as target, Process("interrupted.py") as writer:
        target.receive()
        key = target.ask("expose", length=32 * MIB, memory="foreign")["key"]
        writer.send(key=key, rail="fault+local?delay_us=2000&reorder=8")
        assert writer.receive() == {"streaming": True}
        writer.send_signal(signal.SIGINT)
        assert writer.receive() == {"interrupted": True, "threads": 1}
        assert writer.child.wait(10) == 0
        assert target.ask("digest", length=1)["length"] == 1
        assert target.ask("find", byte=0x5C)["count"] == 0, "the source was read after the fabric had closed"
        target.close()


def test_killed_processes_leave_nothing_in_shared_memory() -> None:
    """Segments of the local provider have no names, so that they end with their processes, however those end."""
    need("local")
    for _ in range(2):
        with party("local") as writer, party("local") as target:
            writer.receive(), target.receive()
            key = target.ask("expose", length=8 * MIB)["key"]
            writer.ask("expose", length=MIB, name="source", seed=1)
            writer.send(do="stream", key=key, piece=MIB)
            writer.receive()
            writer.send_signal(signal.SIGKILL)
            target.send_signal(signal.SIGKILL)
            assert writer.child.wait(5) == target.child.wait(5) == -signal.SIGKILL
            for name in os.listdir("/dev/shm"):
                assert not {str(writer.child.pid), str(target.child.pid)} & set(re.split(r"\D+", name)), name


@pytest.mark.slow
def test_a_fabric_keeps_nothing_of_killed_peers() -> None:
    """Over shared memory; over sockets a rail looks after the dead once it knows more than InboundList::kCrowd."""
    rail = "local"
    need(rail)
    with party(rail) as survivor:
        survivor.receive()
        inbox = survivor.ask("expose", length=64 * KIB)["key"]
        imm = survivor.ask("counter")["imm"]
        survivor.ask("expose", length=4 * KIB, name="source", seed=1)

        def die(number: int) -> None:
            with party(rail) as other:
                address = other.receive()["address"]
                key = other.ask("expose", length=64 * KIB)["key"]
                other.ask("expose", length=4 * KIB, name="source", seed=2)
                other.ask("write", key=inbox, length=4 * KIB, imm=imm)
                survivor.ask("connect", address=address)
                survivor.ask("write", key=key, length=4 * KIB, imm=1)
                other.send(do="stream", key=inbox, piece=4 * KIB, imm=imm)
                assert other.receive() == {"streaming": True}
                survivor.ask("submit", key=key, piece=4 * KIB, count=16, imm=1)

        def forgotten() -> None:
            deadline = time.monotonic() + PATIENCE
            while connected := survivor.ask("census")["connected"]:
                assert time.monotonic() < deadline, f"{connected} peers that were killed are still connected"
                time.sleep(LOOK_S)

        nothing_is_kept({"the fabric's process": survivor}, die, forgotten)
        survivor.close()

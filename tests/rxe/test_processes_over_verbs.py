"""Ring 6: real processes over soft-RoCE. A killed peer fails what was for it, by name and in time, and nothing else."""

from __future__ import annotations

import signal

from processes import party

MIB = 1 << 20
PATIENCE = 90.0  # Python starts slowly in the emulated machine
DEADLINE = 4.0


def test_target_killed_mid_transfer() -> None:
    options = {"peer_deadline_network": DEADLINE, "connect_deadline": 30.0}
    with party("verbs:rxe0", **options) as writer, party("verbs:rxe3") as target, party("verbs:rxe4") as other:
        for one in (writer, target, other):
            one.receive(PATIENCE)
        key = target.ask("expose", length=MIB, memory="foreign")["key"]
        elsewhere = other.ask("expose", length=MIB, memory="foreign")["key"]
        imm = other.ask("counter")["imm"]
        writer.ask("expose", length=MIB, name="source", seed=1, patience=PATIENCE)
        writer.ask("write", key=elsewhere, length=100_000, imm=imm, patience=PATIENCE)
        writer.send(do="stream", key=key, piece=100_000)
        assert writer.receive(PATIENCE) == {"streaming": True}
        killed = target.send_signal(signal.SIGKILL)
        error = writer.receive(PATIENCE)
        assert error["error"] in ("PeerError", "TransferError"), error
        assert error["at"] - killed < DEADLINE + 6, error
        writer.ask("write", key=elsewhere, length=100_000, imm=imm)
        assert other.ask("wait", imm=imm, value=2)["value"] == 2
        assert writer.fail("write", key=key, length=64)["error"] in ("PeerError", "TransferError", "StaleKeyError")
        writer.close()
        other.close()


def test_writer_killed_while_the_target_waits() -> None:
    options = {"peer_deadline_network": DEADLINE, "connect_deadline": 30.0}
    with party("verbs:rxe0") as writer, party("verbs:rxe3", **options) as target, party("verbs:rxe1") as other:
        address = writer.receive(PATIENCE)["address"]
        home = target.receive(PATIENCE)["address"]
        other.receive(PATIENCE)
        key = target.ask("expose", length=MIB, memory="foreign")["key"]
        imm = target.ask("counter")["imm"]
        writer.ask("expose", length=MIB, name="source", seed=1, patience=PATIENCE)
        writer.ask("connect", address=home)
        target.ask("connect", address=address)
        target.send(do="wait", imm=imm, value=1 << 40, address=address)
        writer.send(do="stream", key=key, piece=100_000, imm=imm)
        assert writer.receive(PATIENCE) == {"streaming": True}
        killed = writer.send_signal(signal.SIGKILL)
        error = target.receive(PATIENCE)
        assert error["error"] == "PeerError", error
        assert error["at"] - killed < DEADLINE + 6, error
        before = target.ask("value", imm=imm)["value"]
        other.ask("signal", address=home, imm=imm)
        assert target.ask("wait", imm=imm, value=before + 1)["value"] == before + 1
        other.close()
        target.close()

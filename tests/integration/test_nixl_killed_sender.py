"""Notes that leave before their bytes, from processes that release transfers under way and are killed with kill -9.

Whatever happens to its sender, a note that comes has all its bytes. An agent that nobody uses leaves the core alone.
"""

from __future__ import annotations

import time
from threading import Event

import numpy as np
import pytest
from processes import Process

from asyncfabric.integrations.nixl import nixl_agent, nixl_agent_config

AREAS, AREA_BYTES = 8, 1 << 20
LIVES, NOTES = 2, 100
PATIENCE_S = 50.0


class Target:
    """An agent, its areas, and what it got."""

    def __init__(self) -> None:
        self.agent = nixl_agent("target", nixl_agent_config(enable_prog_thread=False))
        self.memory = np.zeros((AREAS, AREA_BYTES), np.uint8)
        self.agent.register_memory([(int(self.memory.ctypes.data), self.memory.nbytes, 0, "")], "DRAM")
        self.moved = self.released = 0
        self._answered: set[tuple[str, bytes]] = set()
        self._given_up: set[tuple[str, bytes]] = set()

    def card(self) -> dict[str, object]:
        """Return what a sender needs."""
        metadata = self.agent.get_agent_metadata().hex()
        return {"metadata": metadata, "name": "target", "address": int(self.memory.ctypes.data)}

    def take(self, answers: bool = True) -> bool:
        """Take notes: check the bytes of each, and answer; return whether there were any."""
        found = self.agent.get_new_notifs()
        for sender, notes in found.items():
            for note in notes:
                what, area, turn = note.split()
                if what == b"moved":
                    assert (sender, turn) not in self._given_up, "a withdrawn note came"
                    assert (self.memory[int(area)] == int(turn) % 251).all(), f"{note!r} came before its bytes"
                    self.moved += 1
                else:
                    self._given_up.add((sender, turn))
                    self.released += 1
                if answers and (sender, turn) not in self._answered:  # one that arrived whole may be released, too
                    self._answered.add((sender, turn))
                    self.agent.send_notif(sender, area)
        return bool(found)


@pytest.mark.parametrize("rail", ["local", "tcp:lo"])
def test_a_note_has_its_bytes_whatever_becomes_of_its_sender(rail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCFABRIC_NIXL_RAILS", rail)
    target = Target()
    early = target.agent._core.exchange.early
    until = time.monotonic() + PATIENCE_S
    waited = rail != "local"  # over TCP the bytes come first, on the same stream
    for life in range(LIVES):
        name = f"sender {life}"
        with Process("nixl_sender.py", name, str(life)) as sender:
            target.agent.add_remote_agent(bytes.fromhex(sender.receive()["metadata"]))
            sender.send(**target.card())
            before = target.moved
            while target.moved < before + NOTES or not (waited and target.released):
                target.take()
                waited = waited or early.waiting
                assert time.monotonic() < until, f"{target.moved} notes, {target.released} releases"
        while list(early.peers):  # until its loss is noticed, and after that
            target.take(answers=False)
            assert time.monotonic() < until, "the slots of a killed sender stay"
        assert not early.waiting
        target.agent.remove_remote_agent(name)
    target.agent._close()


def test_an_idle_agent_leaves_the_core_alone() -> None:
    a, b = (nixl_agent(name, nixl_agent_config()) for name in ("a", "b"))
    a.add_remote_agent(b.get_agent_metadata())
    a.send_notif("b", b"met")
    while not b.get_new_notifs():
        Event().wait(0.001)
    Event().wait(0.2)  # what looks often after work looks seldom now
    before = time.process_time()
    Event().wait(2.0)
    used = time.process_time() - before
    for agent in (a, b):
        agent._close()
    assert used < 2 * 0.05 * 2.0, f"two idle agents used {used:.3f} s of 2 s"

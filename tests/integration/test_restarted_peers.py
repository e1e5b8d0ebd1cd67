"""What a fabric keeps of peers that were killed in the middle of writes, one after the other: nothing."""

from __future__ import annotations

import time

import pytest
from availability import need
from processes import PATIENCE, party
from restarts import LOOK_S, nothing_is_kept

pytestmark = pytest.mark.slow
KIB = 1 << 10


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

"""Other users of the host at the door of a `local` rail: they get nothing, and take no place from who may enter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import Process, party

pytestmark = pytest.mark.slow
MOST_SESSIONS = 1024 + 64


def abstract_socket(pid: int) -> str:
    """Return the name of the abstract socket that a process listens on, as /proc/net/unix shows it."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return next(row[7][1:] for row in rows if len(row) == 8 and row[6] in inodes and row[7].startswith("@asyncfabric"))


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_who_holds_connections_keeps_no_peer_out() -> None:
    with party("local") as target:
        target.receive()
        key = target.ask("expose", length=64)["key"]
        name = abstract_socket(target.child.pid)
        with Process("stranger.py", name, str(MOST_SESSIONS + 100)) as stranger:
            assert stranger.receive()["held"] > MOST_SESSIONS
            with party("local") as writer:
                writer.receive()
                writer.ask("expose", length=64, name="source")
                assert writer.ask("write", key=key, length=64)["bytes"] == 64
                writer.close()
        target.close()

"""Harm the network between the devices of the soft-RoCE machine: links down, loss, delay, reordering.

Device rxeN sits on the interface netN; 0..2 are the writers' side, 3..5 the targets'. restore() undoes everything.
"""

from __future__ import annotations

import json
import subprocess

DEVICES = range(6)


def near(count: int, provider: str = "verbs", options: str = "") -> tuple[str, ...]:
    """Return rails on the first devices of the writers' side."""
    return tuple(f"{provider}:rxe{n}{options}" for n in range(count))


def far(count: int, provider: str = "verbs", options: str = "") -> tuple[str, ...]:
    """Return rails on the first devices of the targets' side."""
    return tuple(f"{provider}:rxe{3 + n}{options}" for n in range(count))


def down(device: int) -> None:
    """Take the link of a device down."""
    _run("ip", "link", "set", f"net{device}", "down")


def up(device: int) -> None:
    """Bring it up again."""
    _run("ip", "link", "set", f"net{device}", "up")


def harm(device: int, *netem: str) -> None:
    """Let tc netem harm what leaves a device, for example `harm(0, "loss", "2%")`."""
    _run("tc", "qdisc", "replace", "dev", f"net{device}", "root", "netem", *netem)


def lost(device: int) -> int:
    """Return how many packets `harm` lost on a device so far."""
    shown = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", f"net{device}"], check=True, capture_output=True, text=True
    )
    return sum(int(queue.get("drops", 0)) for queue in json.loads(shown.stdout))


def restore() -> None:
    """Undo everything."""
    for device in DEVICES:
        subprocess.run(["tc", "qdisc", "del", "dev", f"net{device}", "root"], capture_output=True)
        up(device)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

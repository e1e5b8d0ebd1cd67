"""Network namespaces of `ip netns`: two with a cable between them for as long as a bench runs, and how to enter one.

Both are for root.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncfabric_services.exits import EnvironmentUnfit

CARD = "fabric0"
"""The interface of each."""
UP_S = 10.0
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MNT_DETACH, MS_REC, MS_SLAVE = 2, 0x4000, 0x80000


@contextmanager
def cabled_namespaces() -> Iterator[tuple[str, str]]:
    """Make two namespaces that a veth pair joins, and remove them at the end, also where SIGTERM ends the process.

    In the main thread.

    Raises:
        EnvironmentUnfit: `ip` is missing, or not permitted here.
    """
    if shutil.which("ip") is None:
        raise EnvironmentUnfit("namespaces are made by `ip`, which is not installed here")
    left, right = names = (f"afbench{os.getpid()}a", f"afbench{os.getpid()}b")

    def remove() -> None:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def end(*_: object) -> None:  # at once: an exception from here might be lost in a finalizer
        remove()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    usual = signal.signal(signal.SIGTERM, end)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", left, "link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", right)
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"192.0.2.{number}/24", "dev", CARD)
            for interface in (CARD, "lo"):
                _ip("-n", name, "link", "set", interface, "up")
        deadline = time.monotonic() + UP_S
        # Providers list only interfaces that are running, and a veth runs some moments after both ends are up.
        while any(json.loads(_ip("-n", name, "-j", "link", "show", CARD))[0]["operstate"] != "UP" for name in names):
            if time.monotonic() > deadline:
                raise EnvironmentUnfit(f"{CARD} of the namespaces {left} and {right} does not come up")
        yield names
    finally:
        remove()
        signal.signal(signal.SIGTERM, usual)


def enter_namespace(name: str) -> None:
    """Move the calling thread, and those that it starts, into a namespace, with the /sys that shows its interfaces.

    Raises:
        PermissionError: it may not.
    """
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as there:
        steps: tuple[Callable[[], int], ...] = (
            lambda: library.setns(there.fileno(), CLONE_NEWNET),
            lambda: library.unshare(CLONE_NEWNS),
            lambda: library.mount(b"", b"/", b"none", ctypes.c_ulong(MS_SLAVE | MS_REC), None),
            lambda: library.umount2(b"/sys", MNT_DETACH),
            lambda: library.mount(name.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None),
        )
        for step in steps:
            if step() != 0:
                raise PermissionError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EnvironmentUnfit(
            f"network namespaces cannot be made here: ip {' '.join(arguments)}: {done.stderr.strip()}"
        )
    return done.stdout

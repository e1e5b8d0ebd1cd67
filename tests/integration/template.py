"""Nodes that are forked from programs/template.py instead of importing torch and transformers each: `Template.start`.

Event: `prctl(PR_SET_CHILD_SUBREAPER)` holds while a node starts, so that it becomes a child of this process and is
waited for like any other.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

PROGRAM = Path(__file__).parent / "programs" / "template.py"
SUBREAPER = 36
PATIENCE = 120.0


class Forked:
    """One node, with what `subprocess.Popen` would have of it."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended and return its status, negative for a signal."""
        with self._lock:
            if self.returncode is None:
                if not select.select([self._ended], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"node {self.pid}", timeout or 0.0)
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(self._ended)
            return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait until it has ended; return what it still printed."""
        self.wait(timeout)
        with self.stdout as stdout:
            return stdout.read(), None


class Template:
    """The process that nodes are forked from."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE", "COV_"))},
            )
        self._link.settimeout(PATIENCE)
        self._lock = threading.Lock()

    def start(
        self, arguments: list[str], environment: Mapping[str, str], errors: IO[bytes], namespace: str = ""
    ) -> Forked:
        """Fork a node of the `asyncfabric` command; its stdout can be read, its stderr goes to a file.

        `namespace` is that of its network, by the name that `ip netns` knows; the one of this process by default.
        """
        order = {
            "arguments": arguments,
            "environment": dict(environment),
            "parent": os.getpid(),
            "namespace": namespace,
        }
        reading, writing = os.pipe()
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._link, [json.dumps(order).encode()], [writing, errors.fileno()])
                reported = self._link.recv(64)
            finally:
                _adopt_orphans(False)
                os.close(writing)
        assert reported, "the template process ended; what it printed is above"
        return Forked(int(reported), os.fdopen(reading))

    def end(self) -> None:
        """End it; its nodes live on."""
        self._link.close()
        assert self._process.wait(PATIENCE) == 0


def _adopt_orphans(wanted: bool) -> None:
    assert ctypes.CDLL(None).prctl(SUBREAPER, int(wanted)) == 0


template: Template | None = None
"""Of this session; see conftest.py."""

"""One node of the local launcher: its present process, its addresses, its end. Runs on the event loop.

A node's process ends with the process that started it, however that ends: it asks the kernel for it (PR_SET_PDEATHSIG,
which means the thread that started it, so the event loop's own thread does).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trio

from asyncfabric.errors import BrokenError
from asyncfabric_services.launch.launcher import LaunchedNode, NodeState
from asyncfabric_services.launch.plan import NodePlan

PROGRAM = "import ctypes; ctypes.CDLL(None).prctl(1, 9); from asyncfabric_services.cli import main; main()"
LOG_TAIL = 2000  # characters


@dataclass(slots=True)
class LocalNode:
    """A node of this machine.

    Attributes:
        plan: of the node.
        log: file that its processes append to.
        process: the present one, None before the first.
        state, restarts, reason: as in LaunchedNode.
        http, link: where it listens.
        status: of the process that ended last.
        stopping: set when its next end is to be its last.
        ended: set when it does not come back.
    """

    plan: NodePlan
    log: Path
    process: subprocess.Popen[bytes] | None = None
    state: NodeState = "starting"
    restarts: int = 0
    reason: str = ""
    http: str = ""
    link: str = ""
    status: int = 0
    stopping: trio.Event = field(default_factory=trio.Event)
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def name(self) -> str:
        """Its name."""
        return self.plan.name

    @property
    def role(self) -> str:
        """What it serves."""
        return self.plan.role

    def launched(self) -> LaunchedNode:
        """Return it as every launcher reports nodes."""
        plan = self.plan
        return LaunchedNode(
            plan.name, plan.group, plan.role, self.state, self.http, self.link, self.restarts, self.reason
        )

    async def run(self, environment: Mapping[str, str]) -> None:
        """Start its process and return when that listens.

        Raises BrokenError when it ended instead; the text has the end of its log.

        Cancellation: the process goes on.
        """
        process = self.process = self._spawn(environment)
        assert process.stdout is not None
        line = b""
        async with trio.lowlevel.FdStream(os.dup(process.stdout.fileno())) as stream:
            while not line.endswith(b"\n"):
                chunk = await stream.receive_some()
                if not chunk:
                    await self.wait()
                    text = (await trio.Path(self.log).read_text(errors="replace"))[-LOG_TAIL:]
                    raise BrokenError(f"node {self.name} did not start: {text}")
                line += chunk
        observed = json.loads(line)
        self.http, self.link, self.state = observed["listening"], observed["link"], "running"

    async def wait(self) -> int:
        """Wait until its present process has ended; return the status.

        Cancellation: only this wait ends.
        """
        process = self.process
        assert process is not None
        if process.poll() is None:
            ending = os.pidfd_open(process.pid)
            try:
                await trio.lowlevel.wait_readable(ending)
            finally:
                os.close(ending)
        if process.stdout is not None:
            process.stdout.close()
        self.status = process.wait()
        return self.status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its present process, if there is one."""
        if self.process is not None:
            self.process.send_signal(number)

    def _spawn(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, *self.plan.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, **self.plan.environment},
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the nodes in order
            )

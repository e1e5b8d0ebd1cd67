"""Starts, ends and kills `asyncfabric serve` processes of this machine. Runs on the event loop.

All nodes share a key file of this launch, so their fabrics have a secret. A node ends with the process that started it,
however that ends: it asks the kernel for it (PR_SET_PDEATHSIG, which means the thread that started it, so the event
loop's own thread does). Logs go to files of a folder that is removed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import trio

from asyncfabric.control import make_keys
from asyncfabric.control.keys import write_keys
from asyncfabric.errors import BrokenError
from asyncfabric_services.settings.readers import READERS

PROGRAM = "import ctypes; ctypes.CDLL(None).prctl(1, 9); from asyncfabric_services.cli import main; main()"
END_SECONDS = 20.0
LOG_TAIL = 2000  # characters
LONGEST_TMPDIR = 40  # bytes; folder, name of the node, process and a random number follow, 67 at most


@dataclass(slots=True)
class LocalNode:
    """One running node.

    Attributes:
        name: of the node.
        role: what it serves.
        process: of this machine.
        http: its HTTP address.
        link: its link address.
    """

    name: str
    role: str
    process: subprocess.Popen[bytes]
    http: str = ""
    link: str = ""

    async def get(self, path: str) -> str:
        """Return the body of an HTTP answer; raises OSError when there is none.

        Cancellation: nothing is left over.
        """
        host, _, port = self.http.removeprefix("http://").rpartition(":")
        text = b""
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            async for chunk in stream:
                text += chunk
        return text.decode().partition("\r\n\r\n")[2]

    async def metrics(self) -> dict[str, float]:
        """Return its metrics by name, labels included.

        Raises OSError when it does not answer.

        Cancellation: nothing is left over.
        """
        body = await self.get("/metrics")
        rows = (line.rpartition(" ") for line in body.splitlines() if line.startswith("asyncfabric_"))
        return {name: float(value) for name, _, value in rows}


class Launcher:
    """Nodes as local processes; made by `open_launcher`."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.nodes: dict[str, LocalNode] = {}
        self.ipc_folder = str(folder / "ipc")
        self._folder = folder
        keys = folder / "link.key"
        write_keys(keys, *make_keys(), frozenset(READERS) - {"local"})
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ASYNCFABRIC_CLUSTER__")},
            "ASYNCFABRIC_HTTP__PORT": "0",
            "ASYNCFABRIC_CLUSTER__BIND": f"ipc://{self.ipc_folder}/",
            "ASYNCFABRIC_CLUSTER__KEYS": str(keys),
            **settings,
        }

    async def start(self, role: str, name: str, **more: str) -> LocalNode:
        """Start a node and return it when it listens; the first directory is the one of all later nodes.

        `more` are environment variables of this node alone.

        Raises:
            BrokenError: it ended instead; the text has the end of its log.

        Cancellation: the node is ended with the launcher.
        """
        node = self.nodes[name] = LocalNode(name, role, self._spawn(role, name, more))
        observed = json.loads(await self._first_line(node))
        node.http, node.link = observed["listening"], observed["link"]
        if role == "directory":
            self._environment["ASYNCFABRIC_CLUSTER__DIRECTORY"] = node.link
        return node

    async def end(self, name: str) -> int:
        """Have a node drain and return its exit status.

        Cancellation: the node goes on ending.
        """
        process = self.nodes.pop(name).process
        process.send_signal(signal.SIGTERM)
        return await _ended(process)

    async def ended(self, name: str) -> int:
        """Wait for a node that ends by itself and return its exit status.

        Cancellation: only this wait ends.
        """
        status = await _ended(self.nodes[name].process)
        del self.nodes[name]
        return status

    async def kill(self, name: str) -> None:
        """End a node without a warning.

        Cancellation: shielded; it is a moment.
        """
        process = self.nodes.pop(name).process
        process.kill()
        with trio.CancelScope(shield=True):
            await _ended(process)

    async def end_all(self) -> None:
        """End all nodes, routers first and directories last; those that take too long are killed.

        Cancellation: shielded and bounded.
        """
        order = ("router", "decode", "prefill", "trainer", "rollout", "coordinator", "expert", "directory")
        with trio.CancelScope(shield=True):
            for role in order:
                for name in [node.name for node in self.nodes.values() if node.role == role]:
                    process = self.nodes[name].process
                    with trio.move_on_after(END_SECONDS):
                        await self.end(name)
                    if process.returncode is None:
                        process.kill()
                        await _ended(process)

    def _spawn(self, role: str, name: str, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, "serve", role, "--node-name", name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._environment, **more},
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the nodes in order
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    async def _first_line(self, node: LocalNode) -> bytes:
        assert node.process.stdout is not None
        line = b""
        async with trio.lowlevel.FdStream(os.dup(node.process.stdout.fileno())) as stream:
            while not line.endswith(b"\n"):
                chunk = await stream.receive_some()
                if not chunk:
                    log = await trio.Path(self._log(node.name)).read_text()
                    raise BrokenError(f"node {node.name} did not start: {log[-LOG_TAIL:]}")
                line += chunk
        return line


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process; the thread that waits may outlive a cancelled wait."""
    status = await trio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
    if process.stdout is not None:
        process.stdout.close()
    return status


@asynccontextmanager
async def open_launcher(settings: Mapping[str, str]) -> AsyncIterator[Launcher]:
    """Launch nodes within the scope, with these settings (environment variables); at its end all are ended.

    Cancellation: shielded while they end, at most 20 s for each.
    """
    with TemporaryDirectory(prefix="asyncfabric-", dir=short_folder()) as folder:
        launcher = Launcher(Path(folder), settings)
        try:
            yield launcher
        finally:
            await launcher.end_all()


def short_folder() -> str | None:
    """Return where temporary folders go: as usual, unless TMPDIR is too long for the path of a socket (107 bytes)."""
    return None if len(os.fsencode(gettempdir())) <= LONGEST_TMPDIR else "/tmp"

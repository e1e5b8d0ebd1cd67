"""A node whose HTTP port takes more clients than it has descriptors: it lives, and others reach it before and after."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("hypercorn", reason="nodes need hypercorn")

from cluster import RUN

pytestmark = pytest.mark.slow
DESCRIPTORS = 64


def health(port: int) -> bytes:
    """Return the first bytes of the answer, nothing when the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), 10) as client, suppress(ConnectionError):
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        return client.recv(15)
    return b""


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit of util-linux")
def test_more_clients_than_descriptors_end_no_node(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir(mode=0o700)
    settings = {"ASYNCFABRIC_CLUSTER__BIND": f"ipc://{folder}/d.sock", "ASYNCFABRIC_HTTP__PORT": "0"}
    command = ["prlimit", f"--nofile={DESCRIPTORS}", sys.executable, "-P", "-c", RUN, "serve", "directory"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | settings) as node:
        try:
            assert node.stdout is not None
            port = int(json.loads(node.stdout.readline())["listening"].rpartition(":")[2])
            held = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(2 * DESCRIPTORS)]
            while len(os.listdir(f"/proc/{node.pid}/fd")) < DESCRIPTORS // 2:
                assert node.poll() is None
            for _ in range(3):  # ZeroMQ takes these, and needs a descriptor for each
                held.append(socket.socket(socket.AF_UNIX))
                held[-1].connect(f"{folder}/d.sock")
            assert health(port).startswith(b"HTTP/1.1 200"), "silent connections make room"
            for client in held:
                client.close()
            deadline = time.monotonic() + 20
            while not health(port).startswith(b"HTTP/1.1 200"):
                assert time.monotonic() < deadline
            node.terminate()
            assert node.wait(20) == 0
        finally:
            node.kill()

"""A real etcd of one member for tests, on loopback; it can be stopped, killed and started again with its data."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import processes  # the conftest of integration made it importable
import pytest

PATIENCE_S = 30.0


class Etcd:
    """One etcd; `address` is that of a directory's store in it."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("etcd") is None:
            pytest.skip("ETCD IS NOT INSTALLED: `make test` installs tests/packages.txt where apt can")
        self.folder = folder
        self.child: subprocess.Popen[bytes] | None = None
        for _ in range(5):  # another process may take the port in between
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.member = f"127.0.0.1:{free.getsockname()[1]}"
            if self.start():
                break
        else:
            raise AssertionError((folder / "etcd.log").read_text()[-3000:])
        self.address = f"etcd://{self.member}/test"

    def start(self) -> bool:
        """Start it, with the data that it has; False when it ended at once."""
        here, anywhere = f"http://{self.member}", "http://127.0.0.1:0"
        places = {
            "data-dir": str(self.folder / "etcd"),
            "listen-client-urls": here,
            "advertise-client-urls": here,
            "listen-peer-urls": anywhere,
            "initial-advertise-peer-urls": anywhere,
            "initial-cluster": f"default={anywhere}",
            "logger": "zap",
        }
        with (self.folder / "etcd.log").open("ab") as log:
            arguments = [part for name, value in places.items() for part in (f"--{name}", value)]
            self.child = subprocess.Popen(["etcd", *arguments], stdout=log, stderr=log)
        processes.started.append(self.child.pid)
        deadline = time.monotonic() + PATIENCE_S
        while self.child.poll() is None:
            assert time.monotonic() < deadline, (self.folder / "etcd.log").read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"{here}/health", timeout=1) as answer:
                    if b"true" in answer.read():
                        return True
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        return False

    def kill(self) -> None:
        """End it without a warning; idempotent."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None

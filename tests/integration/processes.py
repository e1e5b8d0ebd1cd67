"""Starts the programs of ring 5 as real processes and talks to them in JSON lines; all are gone at the end."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE = 60.0
FIRST, ALL = 5, 20  # deaths before what a process holds is noted, and until it is compared
LOOK_S = 0.02

started: list[int] = []  # pids of the running test


class Process:
    """One running program. `ask` sends a command and waits for its answer; `send` does not wait."""

    def __init__(self, program: str = "party.py", *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        self.child = subprocess.Popen(
            [*prefix, sys.executable, str(PROGRAMS / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        started.append(self.child.pid)
        self._buffer = b""

    def send(self, **command: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command).encode() + b"\n")

    def receive(self, patience: float = PATIENCE) -> dict[str, Any]:
        """Return the next answer; fails the test when none comes in time or the process ended."""
        assert self.child.stdout is not None
        deadline = time.monotonic() + patience
        with selectors.DefaultSelector() as selector:
            selector.register(self.child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"process {self.child.pid} sent nothing for {patience} s")
                chunk = os.read(self.child.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise AssertionError(f"process {self.child.pid} ended with {self.child.wait(5)}")
                self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, patience: float = PATIENCE, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer; an answer that is an error fails the test."""
        self.send(do=do, **arguments)
        answer = self.receive(patience)
        assert "error" not in answer, f"{do}: {answer}"
        return answer

    def fail(self, do: str, patience: float = PATIENCE, **arguments: Any) -> dict[str, Any]:
        """Send a command that must be answered with an error."""
        self.send(do=do, **arguments)
        answer = self.receive(patience)
        assert "error" in answer, f"{do} succeeded: {answer}"
        return answer

    def send_signal(self, number: signal.Signals) -> float:
        """Send a signal and return when, on the monotonic clock that all processes of a host share."""
        self.child.send_signal(number)
        return time.monotonic()

    def close(self, patience: float = PATIENCE) -> None:
        """Close in good order and check that the process reports it and ends with 0."""
        self.send(do="close")
        assert self.receive(patience) == {"closed": True}
        assert self.child.stdin is not None
        self.child.stdin.close()
        assert self.child.wait(patience) == 0

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()


def party(*rails: str, prefix: tuple[str, ...] = (), **options: Any) -> Process:
    """Start a party with these rails; its first answer holds where it is."""
    process = Process(prefix=prefix)
    process.send(rails=list(rails), options=options)
    return process


def held(process: Process) -> dict[str, int]:
    """Return what the kernel holds for a process: pieces, by kind."""
    place = Path("/proc", str(process.child.pid))
    return {
        "descriptors": len(os.listdir(place / "fd")),
        "threads": len(os.listdir(place / "task")),
        "maps of shared memory": sum("asyncfabric" in line for line in (place / "maps").read_text().splitlines()),
    }


def nothing_is_kept(survivors: dict[str, Process], die: Callable[[int], None], forgotten: Callable[[], None]) -> None:
    """Let others die, each by `die(number)`; survivors hold no more once the dead are `forgotten`.

    What was closed, or a thread that waited for work, may be gone a moment later: it is looked for until it is.
    """
    for number in range(FIRST):
        die(number)
    forgotten()
    before = {name: held(process) for name, process in survivors.items()}
    for number in range(FIRST, ALL):
        die(number)
    forgotten()
    deadline = time.monotonic() + PATIENCE
    for name, process in survivors.items():
        while more := {kind: count for kind, count in held(process).items() if count > before[name][kind]}:
            assert time.monotonic() < deadline, (
                f"{name} holds {more} after {ALL} deaths, and after {FIRST} {before[name]}"
            )
            time.sleep(LOOK_S)

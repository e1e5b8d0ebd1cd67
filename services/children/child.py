"""The parent's side of a child process: start it, exchange typed messages, learn what it died of, end it.

Usable with and without an event loop: `send`, `take` and `end` are for a thread that may block, `receive` is for trio.
One JSON object per line each way over the child's stdin and stdout; the child's side is worker.py.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import trio

BLOCK_BYTES = 1 << 20
STDERR_BYTES = 16 << 10
STDERR_LINES = 30


class ChildDied(Exception):
    """A child is gone; the text states how it ended and has the last lines of its stderr."""


class ChildProcess:
    """One child process that runs a module of ours.

    Attributes:
        role: what the child is for; its name in errors.
        pid: its process id.
    """

    def __init__(
        self,
        role: str,
        module: str,
        arguments: Iterable[str] = (),
        *,
        receives: Any,
        environment: Mapping[str, str] | None = None,
        inherit: Sequence[int] = (),
    ) -> None:
        """Start `python -m module`, in a process group of its own: Ctrl-C reaches the parent alone.

        Args:
            role: see above.
            module: to run as a program.
            arguments: of the program.
            receives: the tagged union of structs that the child sends.
            environment: of the child; default: the parent's.
            inherit: descriptors that the child may use under the same numbers.
        """
        self.role = role
        self._decoder = msgspec.json.Decoder(receives)
        self._buffer = bytearray()
        self._scanned = 0
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            bufsize=0,  # `end` closes a pipe that a thread still writes to
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
            pass_fds=tuple(inherit),
            process_group=0,
        )
        self.pid = self._process.pid

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; blocks while the pipe is full, raises ChildDied when the child is gone."""
        assert self._process.stdin is not None
        line = memoryview(msgspec.json.encode(message) + b"\n")
        try:
            while line:
                line = line[self._process.stdin.write(line) :]
        except BrokenPipeError:
            raise ChildDied(f"{self.role} died: {self.death()}") from None

    @property
    def ready(self) -> bool:
        """Whether a whole message is there for `next_nowait`."""
        return self._line_end() >= 0

    def next_nowait(self) -> Any:
        """Return the oldest message that was taken, None when no whole one is there."""
        end = self._line_end()
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._scanned = 0
        return self._decoder.decode(line)

    def take(self) -> bool:
        """Take what the child sent, waiting for it where `fileno` is not readable; False when the child has closed."""
        block = os.read(self.fileno(), BLOCK_BYTES)
        self._buffer += block
        return bool(block)

    async def receive(self) -> Any:
        """Return the next message, None when the child has closed its end.

        Cancellation: nothing is lost.
        """
        while (message := self.next_nowait()) is None:
            await trio.lowlevel.wait_readable(self.fileno())
            if not self.take():
                return None
        return message

    def fileno(self) -> int:
        """Return the descriptor that messages come from, for select."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def death(self) -> str:
        """Wait for the end of a child that has closed; return how it ended, with the last lines of its stderr."""
        status = self._process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return "".join([how, *(f"\n    {line}" for line in self.stderr().splitlines()[-STDERR_LINES:])])

    def stderr(self) -> str:
        """Return the end of what the child has written to its stderr so far, at most 16 KiB."""
        size = os.fstat(self._stderr.fileno()).st_size
        start = max(0, size - STDERR_BYTES)
        return os.pread(self._stderr.fileno(), STDERR_BYTES, start).decode(errors="replace")

    def hang_up(self) -> None:
        """Close the child's stdin, at which it ends by itself, without waiting for that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End the child at once; `end` must follow."""
        self._process.kill()

    def end(self, seconds: float) -> str:
        """Hang up and see the child leave; return the end of its stderr. Blocks; at the last, once.

        A child that takes longer than so many seconds is terminated, and killed when it takes as long again.
        """
        self.hang_up()
        for stop in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                stop()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        written = self.stderr()
        self._stderr.close()
        return written

    def _line_end(self) -> int:
        end = self._buffer.find(b"\n", self._scanned)
        self._scanned = len(self._buffer) if end < 0 else end  # a long line is not searched again and again
        return end


def wait_any(children: Sequence[ChildProcess], seconds: float) -> list[ChildProcess]:
    """Block until one of some children sent something or closed; return these, none after so many seconds."""
    return select.select(children, [], [], seconds)[0] if seconds > 0 else []

"""Programs of this ring as child processes that answer a line of JSON with a line of JSON, until their input ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"


class Child:
    """A running program; its first line is `hello`. Leaving the block ends it and whatever it started."""

    def __init__(self, program: str, *arguments: str, **environment: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAMS / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        self.pid = self._child.pid
        try:
            self.hello = self._answer()
        except BaseException:
            self.kill()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._child.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._child.stdin, flush=True)
        answer = self._answer()
        assert "error" not in answer, answer["error"]
        return answer

    def kill(self) -> None:
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._close()

    def end(self) -> None:
        """Close its input and wait for its end, which must be a good one."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        status = self._child.wait(120)
        self._close()
        assert status == 0, f"the program ended with {status}"

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, f"process {self._child.pid} ended with {self._child.wait(60)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _close(self) -> None:
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._child.poll() is None:
            self.end()
        else:
            self.kill()

"""An agent "b" in a process of its own, with registered memory, and the calls that its test makes over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

BYTES = 32 << 20
PATIENCE_S = 30.0


def serve(face_name: str, pipe: Connection) -> None:
    """Run the agent until the pipe ends; leaves without the destructors of libraries, which may need the other end."""
    sys.path.insert(0, str(Path(__file__).parent))
    from faces import open_face

    agent = open_face(face_name).agent("b")
    memory = np.zeros(BYTES, np.uint8)
    registered = agent.register_memory([(memory.ctypes.data, BYTES, 0, "")], "DRAM")
    pipe.send((memory.ctypes.data, agent.get_agent_metadata()))
    try:
        while True:
            call, *arguments = pipe.recv()
            if call == "fill":
                memory[:] = arguments[0]
                pipe.send(None)
            elif call == "bytes":
                pipe.send(memory[arguments[0] : arguments[0] + arguments[1]].tobytes())
            elif call == "notes":
                pipe.send(agent.get_new_notifs())
            elif call == "meet":
                pipe.send(agent.add_remote_agent(arguments[0]))
            elif call == "note":
                pipe.send(agent.send_notif(*arguments))
    except EOFError:
        agent.deregister_memory(registered)
        os._exit(0)


class NixlPeer:
    """The process, from the test's side."""

    def __init__(self, face_name: str) -> None:
        """Start the process and wait for its agent's metadata."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(face_name, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.address, self.metadata = self._answer()

    def call(self, call: str, *arguments: Any) -> Any:
        """Make one call and return its answer."""
        self._pipe.send((call, *arguments))
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after SIGKILL the process is gone when this returns."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.join(PATIENCE_S)

    def _answer(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the peer process does not answer"
        return self._pipe.recv()

    def __enter__(self) -> NixlPeer:
        """Return the peer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(PATIENCE_S)
        self._process.kill()
        self._process.join()
        self._process.close()

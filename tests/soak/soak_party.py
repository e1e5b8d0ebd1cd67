"""One process of the soak as the conductor sees it: started again when it was killed, asked, listened to.

Runs in the conductor, under trio; the process itself is `node.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import trio

HERE = Path(__file__).parent
SETTLING_S = 3.0


class Gone(Exception):
    """The process that was asked died or closed its fabric."""


class Broken(Exception):
    """A promise was broken: the soak ends."""


class Party:
    """One process and its lives. `troubles` grows with whatever may make its transfers fail."""

    def __init__(self, number: int, loop: str, soak: Any) -> None:
        self.number, self.loop, self.soak = number, loop, soak
        self.troubles = 0
        self.shaken = 0.0
        self.waits: dict[int, trio.MemorySendChannel[dict[str, Any]]] = {}
        self.next_id = 0
        self.address = ""
        self.born = trio.Event()
        self.process: Any = None
        self.stopped = self.killed = False
        self.speaking = trio.Lock()

    async def run(self) -> None:
        """Keep the process running until the soak ends."""
        while not self.soak.ending:
            self.killed = False
            self.process = await trio.lowlevel.open_process(
                [sys.executable, str(HERE / "node.py"), self.loop],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.soak.errors,
            )
            await self.send(rails=self.soak.rails, options=self.soak.options)
            await self._listen()
            status = await self.process.wait()
            self._everything_gone()
            if status != (-9 if self.killed else 0) or not (self.killed or self.soak.ending):
                raise Broken(f"process {self.number} ({self.loop}) ended with {status}")

    async def _listen(self) -> None:
        buffer = b""
        async for chunk in self.process.stdout:
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                reported = json.loads(line)
                if "born" in reported:
                    self.address = reported["born"]
                    self.born.set()
                elif "id" in reported and (wait := self.waits.pop(reported["id"], None)) is not None:
                    wait.send_nowait(reported)

    def _everything_gone(self) -> None:
        self.born = trio.Event() if self.born.is_set() else self.born
        waits, self.waits = self.waits, {}
        for wait in waits.values():
            wait.send_nowait({"gone": True})

    async def send(self, **order: Any) -> None:
        try:
            async with self.speaking:
                await self.process.stdin.send_all(json.dumps(order).encode() + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Return the answer; an error is an answer, a broken promise ends the soak, and so does silence."""
        if not self.born.is_set():
            raise Gone
        self.next_id += 1
        number = self.next_id
        send, receive = trio.open_memory_channel[dict[str, Any]](1)
        self.waits[number] = send
        await self.send(id=number, do=do, **order)
        reported = None
        with trio.move_on_after(self.soak.patience):
            reported = await receive.receive()
        if reported is None:
            await self.soak.dump(f"process {self.number} does not answer {do} {str(order)[:300]}")
        if "gone" in reported:
            raise Gone
        if "fault" in reported:
            raise Broken(f"process {self.number} ({self.loop}), {do}: {reported['fault']}")
        return reported

    def trouble(self) -> None:
        self.troubles += 1
        self.shaken = time.monotonic()

    def calm(self) -> bool:
        return not self.stopped and time.monotonic() > self.shaken + SETTLING_S

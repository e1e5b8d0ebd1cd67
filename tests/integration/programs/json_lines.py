"""How programs of the tests are spoken to: a line of JSON each way; `processes.py` is the other end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import trio


def answer(value: dict[str, Any]) -> None:
    """Print an answer."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def lines() -> AsyncIterator[bytes]:
    """Yield lines of standard input without a thread, so that a signal finds the process in the event loop."""
    buffer = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        async for chunk in stream:
            buffer += chunk
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                yield line

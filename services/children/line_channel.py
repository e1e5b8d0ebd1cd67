"""Messages as JSON lines over a pair of byte streams: the pipes between a child and its parent.

One task receives; any task may send.
"""

from __future__ import annotations

from typing import Any

import msgspec
import trio
from trio.abc import ReceiveStream, SendStream


class LineChannel:
    """Sends any struct, receives structs of one tagged union."""

    def __init__(self, send_stream: SendStream, receive_stream: ReceiveStream, receives: Any) -> None:
        """Take both streams, and close them with `aclose`; `receives` is the union that lines are decoded to."""
        self._send_stream = send_stream
        self._receive_stream = receive_stream
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(receives)
        self._lock = trio.Lock()
        self._buffer = bytearray()

    async def send(self, message: msgspec.Struct) -> None:
        """Send one message; raises trio.BrokenResourceError when the other end is gone.

        Cancellation: may leave half a line behind; the channel is then of no more use.
        """
        async with self._lock:
            await self._send_stream.send_all(self._encoder.encode(message) + b"\n")

    async def receive(self) -> Any | None:
        """Return the next message, None when the other end has closed.

        Cancellation: nothing is lost.
        """
        while (end := self._buffer.find(b"\n")) < 0:
            data = await self._receive_stream.receive_some(65536)
            if not data:
                return None
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return self._decoder.decode(line)

    async def aclose(self) -> None:
        """Close both streams.

        Cancellation: both are closed anyway.
        """
        try:
            await self._send_stream.aclose()
        finally:
            await self._receive_stream.aclose()

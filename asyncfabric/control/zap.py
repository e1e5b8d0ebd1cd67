"""Who may connect: the answers of a ZeroMQ authentication handler (RFC 27, ZAP 1.0), and events of socket monitors.

Pure bytes in, bytes out. libzmq asks over an inproc socket during each CURVE handshake; `zmq_wire` reads that socket on
the event loop, since pyzmq's own handler runs in a thread of its own or needs asyncio.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

DOMAIN: Final = b"asyncfabric"
ENDPOINT: Final = "inproc://zeromq.zap.01"


@dataclass(frozen=True, slots=True)
class KeyVerdict:
    """The answer to one request, and why somebody was refused ("" when nobody was)."""

    answer: list[bytes]
    refused: str


def judge(request: Sequence[bytes], trusted: Container[str]) -> KeyVerdict:
    """Answer one request: 200 for a trusted CURVE key of our domain, 400 for everything else. Never raises."""
    version, number = (*request[:2], b"", b"")[:2]
    refused = ""
    key = request[6].hex() if len(request) == 7 else ""
    if version != b"1.0" or len(request) != 7:
        refused = "the request is no ZAP 1.0"
    elif request[2] != DOMAIN or request[5] != b"CURVE":
        refused = f"mechanism {request[5][:20]!r}"
    elif key not in trusted:
        refused = f"key {key} of {request[3][:40].decode(errors='replace')} is not trusted"
    code, text = (b"400", b"not trusted") if refused else (b"200", b"OK")
    return KeyVerdict([b"1.0", number, code, text, b"" if refused else key.encode(), b""], refused)


def monitor_event(parts: Sequence[bytes]) -> tuple[int, int]:
    """Return (event, value) of a message of a socket monitor; (0, 0) for anything else."""
    if not parts or len(parts[0]) != 6:
        return 0, 0
    event, value = struct.unpack("=HI", parts[0])
    return event, value

"""Addresses of links as text: a ZeroMQ endpoint and, with CURVE, the public key of who listens there.

Pure. `ipc:///run/user/1000/asyncfabric/node.sock`, `tcp://127.0.0.1:4711#curve=<64 hex digits>`, and
`tcp://127.0.0.1:4711#insecure` for plain TCP, which is refused unless it was asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_ADDRESS: Final = 512
_FORM = re.compile(r"(?P<endpoint>(?P<scheme>ipc|tcp)://[^\s#]+)(#(curve=(?P<key>[0-9a-f]{64})|(?P<plain>insecure)))?")


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """A parsed address; `key` is 64 hex digits, or "" for ipc and for plain TCP."""

    endpoint: str
    key: str = ""

    @property
    def is_tcp(self) -> bool:
        """Whether bytes leave the process over TCP."""
        return self.endpoint.startswith("tcp://")

    @classmethod
    def parse(cls, text: str) -> LinkAddress:
        """Parse the text form; raises TypeError or ValueError naming the text and the form."""
        if not isinstance(text, str):
            raise TypeError(f"an address is text, as `Link.address` gives it; got {type(text).__name__}")
        found = _FORM.fullmatch(text) if len(text) <= MAX_ADDRESS else None
        if found is None:
            raise ValueError(
                f"address {text[:80]!r}: expected ipc:///path/to/socket, tcp://host:port#curve=<64 hex digits> "
                "or tcp://host:port#insecure, as `Link.address` gives it"
            )
        marked = bool(found["key"] or found["plain"])
        if marked != (found["scheme"] == "tcp"):
            raise ValueError(
                f"address {text!r}: tcp needs #curve=<public key of the listener> (or #insecure), ipc takes neither"
            )
        return cls(found["endpoint"], found["key"] or "")

    @classmethod
    def parse_all(cls, text: str) -> tuple[LinkAddress, ...]:
        """Parse addresses joined by commas, as of the directories of one cluster; raises as `parse`."""
        return tuple(cls.parse(part.strip()) for part in str.split(text, ","))

    def __str__(self) -> str:
        """Return the text form."""
        if not self.is_tcp:
            return self.endpoint
        return f"{self.endpoint}#curve={self.key}" if self.key else f"{self.endpoint}#insecure"

"""The state of one node, as `/health` tells it: starting, ready, draining or failed. Used on the event loop."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["starting", "ready", "draining", "failed"]


@dataclass(slots=True)
class Condition:
    """What a node is and how it is.

    Attributes:
        name: of the node.
        role: router, prefill, decode, directory or local.
        state: changed by the node itself.
        reason: why it is not ready, for people.
    """

    name: str
    role: str
    state: State = "starting"
    reason: str = ""

    @property
    def ready(self) -> bool:
        """Return whether new work is welcome."""
        return self.state == "ready"

    def plain(self) -> dict[str, Any]:
        """Return what `/health` answers."""
        told = {"state": self.state, "role": self.role, "name": self.name}
        return told | ({"reason": self.reason} if self.reason else {})


def node_name(given: str) -> str:
    """Return the name of this process's node: the given one, or host name and process id."""
    return given or f"{socket.gethostname()}-{os.getpid()}"

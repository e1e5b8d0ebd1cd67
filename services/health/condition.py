"""The state of one node, as `/health` reports it, and what it still needs to be ready. Used on the event loop."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncfabric.control.messages import checked_name

State = Literal["starting", "ready", "draining", "failed"]
MOST_HOST = 48  # characters of a host's name in the name of a node, which has room for a process id beside it


@dataclass(slots=True)
class Condition:
    """What a node is and how it is.

    Attributes:
        name: of the node.
        role: router, prefill, decode, directory or local.
        state: changed by the node itself; "ready" means that its own part is done.
        reason: why it is draining or has failed, for people.
        needs: by name, what the node needs of others besides: each returns what is missing, "" for nothing.
    """

    name: str
    role: str
    state: State = "starting"
    reason: str = ""
    needs: dict[str, Callable[[], str]] = field(default_factory=dict)

    @property
    def takes_work(self) -> bool:
        """Return whether work that comes is done: also while a need is missing, since others may still find us."""
        return self.state == "ready"

    @property
    def ready(self) -> bool:
        """Return whether new work is welcome: the node serves, and has all that it needs."""
        return self.takes_work and not self.missing()

    @property
    def alive(self) -> bool:
        """Return whether the process does what it should; a new one would not help a node that lacks something."""
        return self.state != "failed"

    def missing(self) -> dict[str, str]:
        """Return what the node needs and has not, with the reason."""
        return {name: reason for name, need in self.needs.items() if (reason := need())}

    def drain(self, reason: str) -> None:
        """Take no new work from now on; a node that failed stays so."""
        if self.alive:
            self.state, self.reason = "draining", reason

    def fail(self, reason: str) -> None:
        """Take no new work from now on, and end with an error."""
        self.state, self.reason = "failed", reason

    def plain(self) -> dict[str, Any]:
        """Return what `/health` answers; a node that only lacks something is "waiting"."""
        missing = self.missing()
        state = "waiting" if missing and self.takes_work else self.state
        answer = {"state": state, "role": self.role, "name": self.name}
        return answer | ({"reason": self.reason} if self.reason else {}) | ({"missing": missing} if missing else {})


def node_name(given: str) -> str:
    """Return the name of this process's node: the given one, or host name and process id.

    Raises ValueError for a name that is none.
    """
    if given:
        return checked_name("the name of a node", given)
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:MOST_HOST]
    return f"{host}-{os.getpid()}"

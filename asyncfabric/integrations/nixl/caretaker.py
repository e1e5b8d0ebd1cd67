"""The caretaker: one thread for an agent, which does what its callers leave undone.

It sends the notes of transfers that nobody polls, takes in notes that nobody asks for (a target that never calls its
agent must not hold its senders up) and forgets dropped handles. It looks every 2 ms while there is work and ever less
often without, every 50 ms in the end; nobody wakes it, since that would cost callers that poll.
"""

from __future__ import annotations

import logging
from threading import Thread
from typing import TYPE_CHECKING

from asyncfabric.errors import ClosedError

if TYPE_CHECKING:
    from asyncfabric.integrations.nixl.core import AgentCore

logger: logging.Logger = logging.getLogger(__name__)

BUSY_S, IDLE_S = 0.002, 0.050


def start_caretaker(core: AgentCore) -> None:
    """Start the thread of an agent; it ends when the agent is stopped, within one look."""
    core.caretaker = thread = Thread(target=_run, args=(core,), name=f"nixl agent {core.name}", daemon=True)
    thread.start()


def tend(core: AgentCore) -> bool:
    """Do what is there to do, once; return whether there is more to come."""
    for request in tuple(core.noted):
        if request.tend():
            core.noted.discard(request)
    for _ in range(len(core.leftovers)):
        request = core.leftovers.popleft()
        if not request.drained():
            core.leftovers.append(request)
    came = core.exchange.collect()
    return bool(came or core.noted or core.leftovers or core.exchange.early.waiting)


def _run(core: AgentCore) -> None:
    pause = BUSY_S
    while not core.stopped.wait(pause):
        try:
            pause = BUSY_S if tend(core) else min(2 * pause, IDLE_S)
        except ClosedError:
            return
        except Exception:
            logger.exception("the caretaker of agent %r goes on after a failure", core.name)

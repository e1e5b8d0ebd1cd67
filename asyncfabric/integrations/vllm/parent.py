"""Parent: ends a process of vLLM's engine when the node that it belongs to has ended, also by kill -9.

vLLM's engine runs in processes of its own, which go on, with the GPU's memory, when nobody is left to ask them.
"""

from __future__ import annotations

import os
import select
import signal
import threading

_watched: set[int] = set()


def end_with(pid: int) -> None:
    """Kill this process as soon as another one of this host has ended; at once if there is no such process.

    A pid that is this process, or that is watched already, changes nothing.
    """
    if pid == os.getpid() or pid in _watched:
        return
    _watched.add(pid)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_watch, args=(descriptor,), name="parent watch", daemon=True).start()


def _watch(descriptor: int) -> None:
    select.select([descriptor], [], [])  # a pidfd can be read once its process has ended
    os.kill(os.getpid(), signal.SIGKILL)

"""The child's side: its stdin and stdout become the channel to the parent. For the main thread, before the event loop.

Prints of libraries go to stderr, since stdout belongs to the messages. Ctrl-C is the parent's to decide on, which
closes the child's stdin.
"""

from __future__ import annotations

import os
import signal
from typing import Any, NamedTuple

import trio

from asyncfabric_services.children.line_channel import LineChannel


class ParentPipes(NamedTuple):
    """Descriptors of a child's pipes: messages come from `incoming` and go to `outgoing`."""

    incoming: int
    outgoing: int

    def channel(self, receives: Any) -> LineChannel:
        """Return the channel to the parent, within trio; `receives` is the union that the parent sends.

        Closing it leaves the pipes open: a last message to the parent is still possible.
        """
        outgoing, incoming = (trio.lowlevel.FdStream(os.dup(each)) for each in (self.outgoing, self.incoming))
        return LineChannel(outgoing, incoming, receives)


def take_pipes() -> ParentPipes:
    """Take stdin and stdout of this process for messages, and ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipes = ParentPipes(os.dup(0), os.dup(1))
    os.dup2(2, 1)
    return pipes

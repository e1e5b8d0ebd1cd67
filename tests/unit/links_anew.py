"""A session that ends and another that begins while the listener stands still: it reads of both at once."""

from __future__ import annotations

from typing import Any

from asyncfabric.control import Link
from asyncfabric.control.address import LinkAddress
from asyncfabric.control.events import PathLost


def begin_anew(dialer: Link, listener: Link) -> None:
    """Have the dialer lose its session and dial again; return when the listener has read both, and no task has run."""
    here: Any = dialer._board
    there: Any = listener._board
    (session,) = there.table.sessions.values()
    here.feed(PathLost(next(iter(here.table.sessions)), "it broke"))
    here.dial(listener.address, LinkAddress.parse(listener.address))
    while not there.table.sessions or session in there.table.sessions.values():
        there.wire.drain()


def send_at_once(dialer: Link, listener: Link, channel: str, body: bytes) -> None:
    """Send something in the session that has just begun; return when the listener has it, and no task has run."""
    here: Any = dialer._board
    there: Any = listener._board
    while not any(peer.identity == listener.identity for peer in dialer.peers()):
        here.wire.drain()
    assert dialer._send_nowait(listener.identity, channel, body, None)
    taken = listener.statistics().bytes_received
    while listener.statistics().bytes_received < taken + len(body):
        there.wire.drain()

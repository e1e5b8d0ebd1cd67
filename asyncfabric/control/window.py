"""Credit of one session: how much each channel may have under way, counted on both sides. Pure.

A parcel costs its bytes plus OVERHEAD_BYTES. The receiver states how much its listeners took in all; the sender keeps
what it sent minus that at or below the window. So a slow listener stops its own senders on its own channel, and
nothing else. Totals only grow, so a credit that comes twice does no harm.

Liveness: credit is given back once GIVE_BACK of the window is owed, and no parcel costs more than the rest. A sender
that waits has more than GIVE_BACK under way; when all of it was taken, credit has been given.
"""

from __future__ import annotations

from typing import Final

OVERHEAD_BYTES: Final = 256
GIVE_BACK: Final = 4  # a quarter of the window
MAX_CHANNELS: Final = 64


def cost_of(body_bytes: int) -> int:
    """Return what a body of this length costs."""
    return body_bytes + OVERHEAD_BYTES


def largest_body(window_bytes: int) -> int:
    """Return the largest body that may be sent under this window, by the liveness rule above."""
    return window_bytes - window_bytes // GIVE_BACK - OVERHEAD_BYTES


class SendWindow:
    """The sender's half."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sent: dict[str, int] = {}
        self.taken: dict[str, int] = {}

    def admits(self, channel: str, cost: int) -> bool:
        """Return whether a parcel of this cost may be sent now."""
        return self.sent.get(channel, 0) - self.taken.get(channel, 0) + cost <= self.limit

    def knows(self, channel: str) -> bool:
        """Return whether the channel is open, or may be opened: the peer takes MAX_CHANNELS."""
        return channel in self.sent or len(self.sent) < MAX_CHANNELS

    def send(self, channel: str, cost: int) -> None:
        """Note a parcel as sent."""
        self.sent[channel] = self.sent.get(channel, 0) + cost

    def credit(self, channel: str, taken: int) -> bool:
        """Note the peer's total; False when it claims to have taken what was never sent."""
        if taken > self.sent.get(channel, -1):
            return False
        self.taken[channel] = max(taken, self.taken.get(channel, 0))
        return True


class ReceiveWindow:
    """The receiver's half."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.arrived: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self.reported: dict[str, int] = {}

    def arrive(self, channel: str, cost: int) -> str:
        """Note a parcel; return "" or the reason for which the peer may not have sent it."""
        if channel not in self.arrived and len(self.arrived) >= MAX_CHANNELS:
            return "channels"
        arrived = self.arrived.get(channel, 0) + cost
        if arrived - self.reported.get(channel, 0) > self.limit:
            return "overrun"
        self.arrived[channel] = arrived
        return ""

    def take(self, channel: str, cost: int) -> int | None:
        """Note that a listener took a parcel; return the total to report to the peer when enough is owed."""
        taken = self.taken[channel] = self.taken.get(channel, 0) + cost
        if (taken - self.reported.get(channel, 0)) * GIVE_BACK < self.limit:
            return None
        self.reported[channel] = taken
        return taken

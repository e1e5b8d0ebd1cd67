"""What one node reported lately, for rates and quantiles over some seconds. Plain values, on the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf, isfinite

from asyncfabric_services.look.rates import Sample

WINDOW_S = 30.0
RATE_LOOKS = 4
BUCKET = 'asyncfabric_router_first_token_seconds_bucket{le="'
ANSWERED = "asyncfabric_router_requests_total{"
RETRIED = "asyncfabric_router_retries_total{"
Buckets = Mapping[float, float]


class NodeHistory:
    """One life of a node.

    Attributes:
        before, now: a sample of some looks ago and the last one: over less time rates flicker.
        missed: how often in a row it did not answer.
        trouble: why it does not answer; empty while it does, and when it was late once: that may have been our fault.
    """

    def __init__(self) -> None:
        self.before: Sample | None = None
        self.now: Sample | None = None
        self.missed = 0
        self.trouble = ""
        self._past: deque[Sample] = deque(maxlen=RATE_LOOKS)
        self._firsts: deque[tuple[float, Buckets]] = deque()

    def take(self, sample: Sample) -> None:
        """Note an answer."""
        if self.now is not None:
            self._past.append(self.now)
            self.before = self._past[0]
        self.now, self.trouble, self.missed = sample, "", 0
        buckets = {
            float(name.removeprefix(BUCKET).removesuffix('"}')): count
            for name, count in sample.metrics.items()
            if name.startswith(BUCKET)
        }
        self._firsts.append((sample.at, buckets))
        while sample.at - self._firsts[0][0] > WINDOW_S:
            self._firsts.popleft()

    def miss(self, trouble: str, *, late: bool) -> None:
        """Note that it did not answer, or not in time."""
        self.missed += 1
        if self.missed > 1 or not late:
            self.trouble = trouble

    def first_token_s(self, share: float) -> float | None:
        """Return the time within which this share of the last first tokens came; None without any."""
        return quantile(share, self._firsts[0][1], self._firsts[-1][1]) if self._firsts else None

    def total(self, prefix: str) -> float | None:
        """Return the sum of all metrics whose names begin so; None for a node that has none, or no sum."""
        found = [value for name, value in self.now.metrics.items() if name.startswith(prefix)] if self.now else []
        return total if found and isfinite(total := sum(found)) else None

    def answered_per_s(self) -> float | None:
        """Return requests answered per second between the two samples."""
        if self.before is None or self.now is None or (now := self.total(ANSWERED)) is None:
            return None
        then = sum(value for name, value in self.before.metrics.items() if name.startswith(ANSWERED))
        return max(0.0, now - then) / max(1e-9, self.now.at - self.before.at)

    def rail_rates(self) -> dict[str, float]:
        """Return bytes per second by peer, as far as two samples show them."""
        if self.before is None or self.now is None:
            return {}
        between = max(1e-9, self.now.at - self.before.at)
        then = _sent(self.before)
        return {peer: max(0.0, count - then.get(peer, 0)) / between for peer, count in _sent(self.now).items()}


def _sent(sample: Sample) -> dict[str, int]:
    sent: dict[str, int] = {}
    for peer in sample.peers:
        if peer.plane == "fabric":
            sent[peer.peer] = sent.get(peer.peer, 0) + peer.bytes_sent
    return sent


def quantile(share: float, older: Buckets, newer: Buckets) -> float | None:
    """Return a quantile of what two readings of a histogram have between them, linear within a bucket as Prometheus.

    Buckets are counts up to a bound, by the bound. None when nothing came between.
    """
    grown = [(bound, newer[bound] - older.get(bound, 0.0)) for bound in sorted(newer)]
    if not grown or grown[-1][1] <= 0:
        return None
    wanted, low, below = share * grown[-1][1], 0.0, 0.0
    for bound, count in grown:
        if count >= wanted and count > below:
            return low if bound == inf else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low

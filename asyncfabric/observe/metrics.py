"""Prometheus metrics of a fabric, in a registry that the caller gives. Needs prometheus-client (extra `serve`).

Read when they are scraped, so they cost nothing between two scrapes. A scrape must come from the event loop's thread,
as every call of a fabric does. Labels are bounded: rails and states, never peers. Not imported by `asyncfabric.observe`
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncfabric.errors import ClosedError
from asyncfabric.types import Statistics

if TYPE_CHECKING:
    from asyncfabric._api.fabric import Fabric

COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bytes_written": ("written_bytes", "Payload written by completed transfers."),
        "bytes_read": ("read_bytes", "Payload read by completed transfers."),
        "ops_submitted": ("submitted_ops", "Transfers, signals and messages handed to the engine."),
        "ops_completed": ("completed_ops", "Of these, the ones that ended well."),
        "ops_failed": ("failed_ops", "Of these, the ones that failed."),
        "ops_cancelled": ("cancelled_ops", "Of these, the ones that were cancelled before they were posted."),
        "work_requests": ("posted_work_requests", "Requests handed to the rails."),
        "immediates_sent": ("sent_immediates", "Immediates handed to the rails."),
        "immediates_received": ("received_immediates", "Immediates that arrived."),
        "stale_arrivals": ("stale_arrivals", "Arrivals for a counter or a region that was closed."),
        "early_arrivals": ("early_arrivals", "Arrivals before their counter was made."),
        "messages_received": ("received_messages", "Two-sided messages that arrived."),
        "messages_refused": ("refused_messages", "Malformed or hostile messages."),
        "steps": ("worker_passes", "Passes of the engine."),
        "sleeps": ("worker_sleeps", "Times that the worker went to sleep."),
        "loop_wakes": ("loop_wakes", "Times that the engine woke the event loop."),
        "inline_steps": ("guest_passes", "Passes that a thread of the program made while the worker slept."),
    }
)
"""Counter of the engine -> subject and unit of its metric, and what it says; all end in `_total`."""

GAUGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "regions": ("registered_regions", "Regions that are registered."),
        "registered_bytes": ("registered_bytes", "Bytes that are registered."),
        "quarantined_regions": ("quarantined_regions", "Regions kept because a peer may still touch them."),
    }
)


class FabricCollector(Collector):
    """Tells one open fabric's counters, peers and rails to a registry; empty after the fabric is closed."""

    def __init__(self, fabric: Fabric, registry: CollectorRegistry, name: str = "fabric") -> None:
        """Join `registry`. `name` becomes the label `fabric`, for processes that have several.

        Raises:
            ValueError: the name is empty.
        """
        if not name:
            raise ValueError("a fabric needs a name to be told apart by, got ''")
        self._fabric = fabric
        self._registry = registry
        self._name = name
        registry.register(self)

    def leave(self) -> None:
        """Leave the registry."""
        self._registry.unregister(self)

    def describe(self) -> list[Metric]:
        """Return nothing: several fabrics of a process share their families, told apart by the label."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families, read now."""
        try:
            statistics = self._fabric.statistics()
        except ClosedError:
            return
        yield from self._counts(statistics)
        yield from self._states(statistics)

    def _counts(self, statistics: Statistics) -> Iterator[Metric]:
        for field, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"asyncfabric_{name}", text, labels=["fabric"])
            counter.add_metric([self._name], statistics.counters[field])
            yield counter
        for field, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"asyncfabric_{name}", text, labels=["fabric"])
            gauge.add_metric([self._name], statistics.counters[field])
            yield gauge

    def _states(self, statistics: Statistics) -> Iterator[Metric]:
        peers = GaugeMetricFamily("asyncfabric_peers", "Peers by state.", labels=["fabric", "state"])
        for state, count in sorted(Counter(peer.state for peer in statistics.peers).items()):
            peers.add_metric([self._name, state], count)
        yield peers
        waits = GaugeMetricFamily(
            "asyncfabric_waits", "Tasks and transfers that wait, as why() lists them.", labels=["fabric"]
        )
        waits.add_metric([self._name], len(self._fabric.why()))
        yield waits
        rails = GaugeMetricFamily(
            "asyncfabric_rail_up", "1 while the rail carries bytes.", labels=["fabric", "rail", "provider", "device"]
        )
        for number, rail in enumerate(statistics.rails):
            rails.add_metric([self._name, str(number), rail.provider, rail.device], int(rail.up))
        yield rails

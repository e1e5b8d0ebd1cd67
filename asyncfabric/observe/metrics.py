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
from weakref import WeakKeyDictionary, ref

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
        "inline_steps": ("caller_passes", "Passes that a thread of the program made while the worker slept."),
    }
)
"""Counter of the engine -> subject and unit of its metric, and what it states; all end in `_total`."""

GAUGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "regions": ("registered_regions", "Regions that are registered."),
        "registered_bytes": ("registered_bytes", "Bytes that are registered."),
        "quarantined_regions": ("quarantined_regions", "Regions kept because a peer may still touch them."),
        "unconfirmed_closes": ("unconfirmed_closes", "Closed counters that peers have not confirmed."),
    }
)


class FabricCollector(Collector):
    """Reports one open fabric's counters, peers and rails to a registry; empty after the fabric is closed."""

    def __init__(self, fabric: Fabric, registry: CollectorRegistry, name: str = "fabric") -> None:
        """Join `registry`. `name` becomes the label `fabric`, for processes that have several.

        Raises:
            ValueError: the name is empty, or that of another open fabric of this registry.
        """
        if not name:
            raise ValueError("a fabric needs a name to be distinguished by, got ''")
        self._fabric = fabric
        self._name = name
        self._together = _joined.get(registry) or _Together(registry)
        self._together.join(self)

    @property
    def name(self) -> str:
        """What the fabric is called, empty when it is closed."""
        return "" if self._fabric.closed else self._name

    def leave(self) -> None:
        """Leave the registry."""
        self._together.leave(self)

    def describe(self) -> list[Metric]:
        """Return nothing: several fabrics of a process share their families, distinguished by the label."""
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


class _Together(Collector):
    """All fabrics of one registry: a family is reported once, with the samples of each, as the text format asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = ref(registry)
        self._members: list[FabricCollector] = []
        _joined[registry] = self
        registry.register(self)

    def join(self, member: FabricCollector) -> None:
        if any(other.name == member.name for other in self._members if other.name):
            raise ValueError(f"a fabric is called {member.name!r} in this registry already: give this one another name")
        self._members.append(member)

    def leave(self, member: FabricCollector) -> None:
        self._members.remove(member)
        registry = self._registry()
        if not self._members and registry is not None:
            registry.unregister(self)
            del _joined[registry]

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for member in self._members:
            for family in member.collect():
                families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                ).samples += family.samples
        yield from families.values()


_joined: WeakKeyDictionary[CollectorRegistry, _Together] = WeakKeyDictionary()

"""Prometheus metrics with one form of name, in a registry that the caller gives; and their exposition.

A name is `asyncfabric_<subject>_<unit>`, counters end in `_total`. Labels have a fixed set of values: a label that
takes its value from a request would grow without bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import isfinite

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def _name(subject: str, unit: str) -> str:
    for word in (subject, unit):
        if _WORD.fullmatch(word) is None:
            raise ValueError(f"{word!r} is no part of a metric's name: expected lower-case words joined by _")
    return f"asyncfabric_{subject}_{unit}"


class Labels:
    """The labels of one metric and the only values that each may take; anything else is counted as `other`."""

    def __init__(self, allowed: Mapping[str, Sequence[str]]) -> None:
        self.names = tuple(allowed)
        self._allowed = {name: frozenset(values) for name, values in allowed.items()}

    def all(self) -> Iterator[tuple[str, ...]]:
        """Return every set of values that is allowed, none where there are no labels."""
        return product(*(sorted(self._allowed[name]) for name in self.names)) if self.names else iter(())

    def bound(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return the values, unknown ones replaced; raises ValueError for a wrong set of names."""
        if set(values) != set(self.names):
            raise ValueError(f"expected the labels {sorted(self.names)}, got {sorted(values)}")
        return {name: value if value in self._allowed[name] else "other" for name, value in values.items()}


class BoundedCounter:
    """A counter whose labels cannot grow. All that are allowed read 0 from the start, so that a rate sees the first."""

    def __init__(
        self, registry: CollectorRegistry, subject: str, unit: str, text: str, **allowed: Sequence[str]
    ) -> None:
        self._labels = Labels(allowed)
        self._counter = Counter(_name(subject, unit), text, self._labels.names, registry=registry)
        for values in self._labels.all():
            self._counter.labels(*values)

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add `amount`."""
        bound = self._labels.bound(labels)
        (self._counter.labels(**bound) if bound else self._counter).inc(amount)


def gauge(registry: CollectorRegistry, subject: str, unit: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """Return a gauge. Its labels take values that the caller has in its code."""
    return Gauge(_name(subject, unit), text, labels, registry=registry)


def histogram(
    registry: CollectorRegistry, subject: str, unit: str, text: str, buckets: Sequence[float] = SECONDS
) -> Histogram:
    """Return a histogram."""
    return Histogram(_name(subject, unit), text, registry=registry, buckets=tuple(buckets))


def exposition(registry: CollectorRegistry) -> bytes:
    """Return all metrics of `registry` as Prometheus reads them."""
    return generate_latest(registry)


def values(registry: CollectorRegistry) -> dict[str, float]:
    """Return all metrics that are finite numbers, by name with labels as in the exposition."""
    return {
        f"{one.name}{_labels(one.labels)}": one.value
        for metric in registry.collect()
        for one in metric.samples
        if isfinite(one.value) and not one.name.endswith("_created")
    }


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels.items())) + "}" if labels else ""

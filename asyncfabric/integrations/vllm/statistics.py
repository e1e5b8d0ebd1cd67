"""Statistics of the connector as vLLM aggregates them, logs them and shows them to Prometheus.

They are made in the processes of vLLM's workers, and come with the outputs of steps to the process that serves, where
`watch_transfers` shows each transfer to whoever draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from asyncfabric.integrations.vllm.versions import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine

SECONDS, BYTES, BLOCKS = "load_seconds", "load_bytes", "load_blocks"
FAILED, CANCELLED, EXPIRED, PUSHED = "failed_loads", "cancelled_loads", "expired_requests", "pushed_bytes"
PUSH, LOAD = "push", "load"
_LISTS = (SECONDS, BYTES, BLOCKS, PUSH, LOAD)
_COUNTS = (FAILED, CANCELLED, EXPIRED, PUSHED)
_HELP = {
    FAILED: "Requests whose KvCache could not be loaded and is computed again.",
    CANCELLED: "Requests that were given up while their KvCache was loading.",
    EXPIRED: "Requests whose KvCache no engine asked for within its lease.",
    PUSHED: "Bytes of KvCache pushed to other engines.",
}

Watcher = Callable[[str, dict[str, Any]], None]
_watchers: list[Watcher] = []


@contextmanager
def watch_transfers(watcher: Watcher) -> Iterator[None]:
    """Call `watcher(kind, transfer)` for each push and load that ended well, on the thread that vLLM records on.

    A transfer has `request` as vLLM names it, `begin_ns` and `end_ns` on CLOCK_MONOTONIC, and `bytes`.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


class FabricStats(KVConnectorStats):
    """What happened since the last call: a list of each load, and sums."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or {})
        if not data:
            self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.data = {name: [] for name in _LISTS} | dict.fromkeys(_COUNTS, 0)

    def moved(self, kind: str, request: str, begin_ns: int, end_ns: int, count: int) -> None:
        """Add a transfer of `count` bytes that ended well."""
        self.data[kind].append({"request": request, "begin_ns": begin_ns, "end_ns": end_ns, "bytes": count})

    def aggregate(self, other: KVConnectorStats) -> FabricStats:
        """Add what another worker or interval has."""
        for name, value in other.data.items():
            self.data[name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return a line for vLLM's log."""
        seconds, moved = self.data[SECONDS], sum(self.data[BYTES])
        total = sum(seconds)
        return {
            "Loads": len(seconds),
            "Avg load time (ms)": round(1e3 * total / len(seconds), 3) if seconds else 0,
            "Loaded MB": round(moved / 1e6, 3),
            "Pushed MB": round(self.data[PUSHED] / 1e6, 3),
            "Failed loads": self.data[FAILED],
            "Cancelled loads": self.data[CANCELLED],
            "Expired requests": self.data[EXPIRED],
        }

    def is_empty(self) -> bool:
        """Return whether nothing happened."""
        return not any(self.data.values())

    def take(self) -> FabricStats | None:
        """Return what there is and begin anew; None for nothing."""
        if self.is_empty():
            return None
        taken = FabricStats(self.data)
        self.reset()
        return taken


class FabricMetrics(KVConnectorPromMetrics):
    """The same for Prometheus."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], engines: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, engines)
        time = self._histogram_cls(
            name="vllm:asyncfabric_load_seconds",
            documentation="Time from the offer of blocks until all of them had arrived.",
            buckets=[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10],
            labelnames=labelnames,
        )
        size = self._histogram_cls(
            name="vllm:asyncfabric_load_bytes",
            documentation="Bytes of KvCache of a loaded request.",
            buckets=[2**power for power in range(12, 36, 2)],
            labelnames=labelnames,
        )
        self._lists = {SECONDS: self._each(time), BYTES: self._each(size)}
        self._counts = {
            name: self._each(
                self._counter_cls(name=f"vllm:asyncfabric_{name}", documentation=text, labelnames=labelnames)
            )
            for name, text in _HELP.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the statistics of an interval."""
        for name, metrics in self._lists.items():
            for value in transfer_stats_data[name]:
                metrics[engine_idx].observe(value)
        for name, metrics in self._counts.items():
            metrics[engine_idx].inc(transfer_stats_data[name])
        for kind in (PUSH, LOAD):
            for transfer in transfer_stats_data[kind]:
                for watcher in _watchers:
                    watcher(kind, transfer)

    def _each(self, metric: Any) -> Any:
        return create_metric_per_engine(metric, self.per_engine_labelvalues)

"""What became of the updates of this process: rows for `/updates`, metrics, and the log. Runs on the event loop."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict
from time import monotonic, time

from prometheus_client import CollectorRegistry

from asyncfabric.weights.update import UpdateReport
from asyncfabric_services.health.metrics import BoundedCounter, gauge
from asyncfabric_services.health.view import Row

MOST_ROWS = 1024

_log = logging.getLogger(__name__)


class UpdateBook:
    """The newest updates of a coordinator, the last one at the end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows: deque[tuple[float, Row]] = deque(maxlen=MOST_ROWS)
        self._updates = BoundedCounter(
            registry, "weights", "updates_total", "Updates that ended.", outcome=("committed", "aborted")
        )
        self._bytes = BoundedCounter(
            registry, "weights", "update_bytes_total", "Written by trainers; saved by codings.", what=("sent", "saved")
        )
        self._at = gauge(registry, "weights", "committed_timestamp_seconds", "When the last one was, 0 before it.")
        self._stages = gauge(
            registry, "weights", "update_seconds", "Of the last one that was committed, as in /updates.", ("stage",)
        )

    def committed(self, report: UpdateReport) -> None:
        """Note an update that was decided."""
        took = {
            "seconds": report.seconds,
            "prepare_s": report.prepare_s,
            "write_s": report.write_s,
            "verify_s": report.verify_s,
            "decide_s": report.decide_s,
        }
        saved_bytes = max(0, sum(each.saved_bytes for each in report.codings))
        for name, seconds in took.items():
            self._stages.labels("all" if name == "seconds" else name.removesuffix("_s")).set(seconds)
        self._at.set(time())
        self._updates.add(outcome="committed")
        self._bytes.add(report.sent_bytes, what="sent")
        self._bytes.add(saved_bytes, what="saved")
        _log.info(
            "version %d is committed: %d receivers, %.3f s", report.version, len(report.receivers), report.seconds
        )
        self._note(
            {"version": report.version, "outcome": "committed", "receivers": list(report.receivers)}
            | {name: round(seconds, 6) for name, seconds in took.items()}
            | {"sent_bytes": report.sent_bytes, "saved_bytes": saved_bytes}
            | {"links": [asdict(each) for each in report.codings]}
        )

    def aborted(self, version: int, reason: str) -> None:
        """Note an update that was not."""
        self._updates.add(outcome="aborted")
        reason = reason.removeprefix(f"version {version} was not committed: ")
        _log.warning("version %d was not committed: %s", version, reason)
        self._note({"version": version, "outcome": "aborted", "reason": reason})

    def rows(self) -> list[Row]:
        """Return the updates; `ago_s` is how long ago each ended."""
        now = monotonic()
        return [row | {"ago_s": round(now - at, 3)} for at, row in self._rows]

    def _note(self, row: Row) -> None:
        self._rows.append((monotonic(), row))

"""One measured point and its JSON row. The keys are a promise to scripts: add, never rename.

`bytes` is the payload of one op (of one page for page lists), `window` the ops in flight, `ratio` compares with
`limit`, measured in the same run: ours over the limit, so 1.0 is as good as the machine for rates, and 2.0 twice as
slow for latencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncfabric.bench.measure import Rate, significant


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured point.

    Attributes:
        figure: which of the figures of this bench, for example `throughput` or `await-round-trip`.
        limit: name of the limit that `ratio` compares with; for rows of `bench limits` the limit that the row is about.
        detail: further keys of the row, for example `level` or `machine`.
    """

    bench: str
    figure: str
    provider: str
    bytes: int
    pages: int = 1
    window: int = 1
    processes: int = 2
    gbytes_per_s: Rate
    ops_per_s: Rate
    p50_us: float | None = None
    p99_us: float | None = None
    verified: bool
    limit: str | None = None
    ratio: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def as_row(self) -> dict[str, Any]:
        """Return the JSON object."""
        row: dict[str, Any] = {
            "bench": self.bench,
            "figure": self.figure,
            "provider": self.provider,
            "bytes": self.bytes,
            "pages": self.pages,
            "window": self.window,
            "processes": self.processes,
            "gbytes_per_s": self.gbytes_per_s.as_row(),
            "ops_per_s": self.ops_per_s.as_row(),
            "p50_us": None if self.p50_us is None else significant(self.p50_us),
            "p99_us": None if self.p99_us is None else significant(self.p99_us),
            "verified": self.verified,
        }
        if self.limit is not None:
            row["limit"] = self.limit
        if self.ratio is not None:
            row["ratio"] = significant(self.ratio)
        return row | dict(self.detail)


def rates(seconds: list[float], ops: int, bytes_moved: int) -> tuple[Rate, Rate]:
    """Return (gbytes_per_s, ops_per_s) over repeats that each did `ops` ops and moved `bytes_moved` bytes."""
    return Rate.of(bytes_moved / each / 1e9 for each in seconds), Rate.of(ops / each for each in seconds)

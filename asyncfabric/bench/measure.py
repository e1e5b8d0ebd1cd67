"""Turn repeats and samples into the values of a row: a rate is (min, median, max), a latency is a percentile.

Pure functions, no clocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate over the repeats of one run."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Rate:
        """Summarise repeats; raises ValueError when there are none."""
        ordered = sorted(values)
        if not ordered:
            raise ValueError("a rate needs at least one repeat, got none")
        return cls(ordered[0], statistics.median(ordered), ordered[-1])

    def as_row(self) -> dict[str, float]:
        """Return the JSON form."""
        return {"min": significant(self.min), "median": significant(self.median), "max": significant(self.max)}


def significant(value: float) -> float:
    """Round to five significant digits: more would only be noise in a table or a diff."""
    return float(f"{value:.5g}")


def percentiles_us(samples_ns: ArrayLike) -> tuple[float, float]:
    """Return (p50, p99) in microseconds of samples in nanoseconds, pooled over everything given."""
    samples = np.asarray(samples_ns, dtype=np.float64)
    if samples.size == 0:
        raise ValueError("percentiles need at least one sample, got none")
    p50, p99 = np.percentile(samples, [50, 99])
    return significant(float(p50) / 1e3), significant(float(p99) / 1e3)


def paired_ratio(ours: Sequence[float], limits: Sequence[float]) -> float:
    """Return the median of the ratios of repeats taken side by side.

    The machine changes its speed from second to second (near and far cores, neighbours): a ratio of two medians
    compares different moments, a median of ratios compares the same ones.
    """
    if len(ours) != len(limits) or not ours:
        raise ValueError(f"ratios need pairs, got {len(ours)} and {len(limits)} repeats")
    return significant(statistics.median(mine / limit for mine, limit in zip(ours, limits, strict=True)))

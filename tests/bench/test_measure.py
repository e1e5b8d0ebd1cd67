"""Rates, percentiles, ratios and rows: pure functions."""

from __future__ import annotations

import json

import pytest

from asyncfabric.bench.limits import repeat_count
from asyncfabric.bench.measure import Rate, paired_ratio, percentiles_us
from asyncfabric.bench.rows import Point, rates

PROMISED_KEYS = {
    "bench",
    "provider",
    "bytes",
    "pages",
    "window",
    "processes",
    "gbytes_per_s",
    "ops_per_s",
    "p50_us",
    "p99_us",
    "verified",
}


def test_a_rate_is_min_median_and_max() -> None:
    assert Rate.of([3.0, 1.0, 2.0]) == Rate(1.0, 2.0, 3.0)
    assert Rate.of([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="at least one repeat"):
        Rate.of([])


def test_percentiles_are_microseconds() -> None:
    assert percentiles_us([1000] * 98 + [5000] * 2) == (1.0, 5.0)
    with pytest.raises(ValueError, match="at least one sample"):
        percentiles_us([])


def test_ratios_compare_the_same_moment() -> None:
    # The machine became ten times slower between the repeats: each pair gives one half, medians of each side do not.
    assert paired_ratio([5.0, 5.0, 0.5], [10.0, 10.0, 1.0]) == 0.5
    assert paired_ratio([5.0, 0.5, 0.5], [10.0, 1.0, 1.0]) == 0.5
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_ratio([1.0], [1.0, 2.0])


def test_repeats_are_lengthened_until_they_fill_their_time() -> None:
    ran: list[int] = []

    def loop(count: int) -> float:
        ran.append(count)
        return count * 0.001

    assert repeat_count(loop, 0.5) == 500
    assert ran == sorted(ran) and ran[-1] * 0.001 >= 0.5 / 4


def test_a_row_has_the_promised_keys_and_survives_json() -> None:
    gbytes_per_s, ops_per_s = rates([0.5, 0.25, 1.0], 10, 10 << 20)
    point = Point(
        bench="write",
        figure="throughput",
        provider="local",
        bytes=1 << 20,
        window=16,
        gbytes_per_s=gbytes_per_s,
        ops_per_s=ops_per_s,
        p50_us=1.23456789,
        verified=True,
        limit="memcpy",
        ratio=0.9,
        detail={"level": "python"},
    )
    row = json.loads(json.dumps(point.as_row()))
    assert row.keys() >= PROMISED_KEYS
    assert row["ops_per_s"] == {"min": 10.0, "median": 20.0, "max": 40.0}
    assert row["p50_us"] == 1.2346 and row["p99_us"] is None
    assert row["limit"] == "memcpy" and row["ratio"] == 0.9 and row["level"] == "python"

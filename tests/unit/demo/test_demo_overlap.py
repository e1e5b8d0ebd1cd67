"""Figures of one prompt from time stamps: unions of intervals, and what of them computation hid."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.kv import StreamWrite
from asyncfabric_services.demo.pair.overlap import busy_ns, figures
from asyncfabric_services.demo.pair.protocol import PairAnswer, Pushed

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda x: (x[0], x[0] + x[1])), max_size=8)


@settings(deadline=None)
@given(intervals=INTERVALS, until=st.none() | st.integers(0, 90))
def test_busy_time_is_the_number_of_covered_nanoseconds(intervals: list[tuple[int, int]], until: int | None) -> None:
    covered = {tick for start, end in intervals for tick in range(start, end) if until is None or tick < until}
    assert busy_ns(intervals, until) == len(covered)


def make_answer() -> PairAnswer:
    return PairAnswer(0, 20, 7, 1_900_000, 0.5, 0.4, 0.01, "text", [])


def pushed(total: int, start_ns: int, end_ns: int, writes: list[tuple[int, int]]) -> Pushed:
    return Pushed(0, total, len(writes), start_ns, end_ns, tuple(StreamWrite(*write, 1) for write in writes))


def test_what_a_write_waited_before_the_computation_began_is_not_the_transfer() -> None:
    row = figures(pushed(10, 1_000_000, 1_500_000, [(200_000, 2_000_000)]), make_answer())
    assert row.busy_ms == pytest.approx(1.0)
    assert row.hidden_share == pytest.approx(0.5)


def test_figures_of_a_prompt() -> None:
    writes = [(1_000_000, 1_200_000), (1_100_000, 1_300_000), (1_600_000, 1_900_000)]
    row = figures(pushed(600_000, 900_000, 1_700_000, writes), make_answer())
    assert row.busy_ms == pytest.approx(0.6)
    assert row.stream_ms == pytest.approx(0.9)
    assert row.gbytes_per_s == pytest.approx(1.0)
    assert row.hidden_share == pytest.approx(400 / 600)
    assert row.identical


def test_a_transfer_after_the_computation_is_not_hidden() -> None:
    assert figures(pushed(10, 0, 50, [(60, 70)]), make_answer()).hidden_share == 0.0

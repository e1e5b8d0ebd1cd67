"""What the soak calls growth: planted leaks are found in the life that has them, noise and warm-up are not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from process_samples import FIGURES, MOST_GROWTH, Life, growth_of, overlooked, read_descriptors, read_process, table

SAMPLES = 36


def life(name: str, seconds: int, **changed: float) -> Life:
    """Return a life that warms up for 600 s and then stays, but for what grows by so much a second."""
    made = Life(name, 7)
    for at in range(0, seconds, 5):
        noise = 1 + 0.004 * ((at // 5) % 3 - 1)
        steady = {figure: 100.0 * noise * min(1.0, 0.5 + at / 1200) for figure in FIGURES}
        made.add(at, steady | {figure: steady[figure] + rate * at for figure, rate in changed.items()})
    return made


def grown(*lives: Life) -> list[tuple[str, str]]:
    found = growth_of(lives, 600, SAMPLES)
    return [(one.life.name, one.figure) for one in found if one.share > MOST_GROWTH]


def test_growth_after_the_warm_up_is_found_where_it_is() -> None:
    assert grown(life("a", 3600), life("short", 900)) == []
    leaking = {"resident MiB": 0.001, "descriptors": 0.002, "pages out": 1.0}
    assert grown(life("a", 3600), life("b", 3600, **leaking)) == [("b", "resident MiB"), ("b", "descriptors")]
    lives = [life("a", 3600), life("short", 900)]
    assert "1 lives were too short" in table(growth_of(lives, 600, SAMPLES), lives)


def test_a_figure_that_was_nothing_may_not_become_something() -> None:
    made = Life("a", 7)
    for at in range(0, 3600, 5):
        made.add(at, {"shared KiB": float(at > 3000)})
    assert grown(made) == [("a", "shared KiB")]


def with_a_peer(seconds: int, absent_at_the_end: int, **rates: float) -> Life:
    """Return a life with a peer that costs 5 descriptors, 10 MiB and at times a thread while it is there.

    It is absent for the first 10 seconds of each minute, and of the last 10 minutes for longer.
    """
    made = Life("a", 7)
    for at in range(0, seconds, 5):
        there = at % 60 >= (absent_at_the_end if at > seconds - 600 else 10)
        costs = {"descriptors": 40 + 5 * there, "resident MiB": 400 + 10 * there, "threads": 8 + (at % 3 == 0)}
        figures = {name: cost + int(rates.get(name, 0) * at) for name, cost in costs.items()}
        made.add(at, figures, calm=there)
    return made


def test_a_peer_that_comes_and_goes_is_no_growth_and_hides_none() -> None:
    steady = with_a_peer(3600, 40)
    steady.values["threads"][-400:] = [8.0, 9.0, 9.0, 9.0] * 100  # its median is another one than at the beginning
    assert grown(steady) == []
    leaking = {"descriptors": 0.0005, "resident MiB": 0.002, "threads": 0.0005}  # one of each in half an hour
    found = grown(with_a_peer(3600, 40, **leaking))
    assert found == [("a", "resident MiB"), ("a", "descriptors"), ("a", "threads")]


def test_a_life_whose_peers_were_never_all_there_is_not_judged() -> None:
    lives = [with_a_peer(3600, 60), life("b", 3600), life("short", 900)]
    found = growth_of(lives, 3000, SAMPLES)
    assert {one.life.name for one in found} == {"b"}
    assert [each.name for each in overlooked(lives, found, 1800)] == ["a"]


def test_what_the_kernel_reports_of_a_process() -> None:
    before, opened = read_process(os.getpid()), read_descriptors(os.getpid())
    assert set(before) == set(FIGURES[:4]) and before["resident MiB"] > 5 and before["threads"] >= 1
    with open("/dev/null"):
        assert read_process(os.getpid())["descriptors"] == before["descriptors"] + 1
        made = Life("a", 7)
        made.add(0, {}, opened)
        made.add(5, {}, read_descriptors(os.getpid()))
        assert made.opened_since(0) == {"/dev/null": 1}
    with pytest.raises(OSError):
        read_process(1 << 22)

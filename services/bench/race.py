"""Contenders measured side by side: each repeat runs all of them once, so that ratios compare the same moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncfabric.bench.limits import repeat_count
from asyncfabric.bench.measure import paired_ratio

Repeat = Callable[[int], float]


@dataclass(slots=True)
class Contender:
    """One loop under measurement. `repeat(count)` does `count` ops and returns seconds; `costs` are seconds per op."""

    name: str
    repeat: Repeat
    count: int = 0
    costs: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each repeat."""
        return [cost * self.count for cost in self.costs]


def race(
    contenders: Sequence[Contender],
    *,
    repeats: int,
    duration: float,
    count: int | None,
    on_start: Callable[[Contender], None] | None = None,
    on_repeat: Callable[[], None] | None = None,
) -> None:
    """Warm each contender up, which also finds its count, then run the repeats in turn. Fills `count` and `costs`."""
    for contender in contenders:
        if count is None:
            contender.count = repeat_count(contender.repeat, duration)
        else:
            contender.count = count
            contender.repeat(count)
        if on_start is not None:
            on_start(contender)
    for _ in range(repeats):
        for contender in contenders:
            contender.costs.append(contender.repeat(contender.count) / contender.count)
        if on_repeat is not None:
            on_repeat()


def fastest(contenders: Sequence[Contender]) -> Contender:
    """Return the one with the lowest median cost: of several ceilings the highest one counts."""
    return min(contenders, key=lambda each: sorted(each.costs)[len(each.costs) // 2])


def speed_ratio(ours: Contender, limit: Contender) -> float:
    """Return our speed over the limit's, repeat by repeat: 1.0 is as fast as the limit."""
    return paired_ratio([1 / cost for cost in ours.costs], [1 / cost for cost in limit.costs])

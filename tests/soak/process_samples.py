"""What processes hold, sampled again and again: read from /proc, judged for growth, drawn as SVG. Starts nothing.

A life is one process of a node: a node that was killed and started again has several. Each is compared with itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

FIGURES = ("resident MiB", "descriptors", "threads", "shared KiB", "regions", "pages out")
GROWING = FIGURES[:5]
"""What must not grow; pages that are out follow the load, and must all be back at the end."""
MOST_GROWTH = 0.01


@dataclass
class Life:
    """One process: `times` in seconds since the soak began, and `values` of each figure at these times."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, time_s: float, figures: Mapping[str, float]) -> None:
        self.times.append(time_s)
        for name in FIGURES:
            self.values.setdefault(name, []).append(figures.get(name, 0.0))

    def middle(self, figure: str, begin_s: float, end_s: float) -> float:
        """Return the median of a window."""
        pairs = zip(self.times, self.values[figure], strict=True)
        return median(value for time_s, value in pairs if begin_s <= time_s <= end_s)


def read_process(pid: int) -> dict[str, float]:
    """Return the figures of a process that the kernel knows; raises OSError when it has ended."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    status = {words[0]: int(words[1]) for words in lines if words[0] in ("VmRSS:", "Threads:")}
    if "VmRSS:" not in status:
        raise ProcessLookupError(f"process {pid} has ended")
    named = (name for name in os.listdir("/dev/shm") if str(pid) in re.split(r"\D+", name))
    shared = sum(Path("/dev/shm", name).stat().st_blocks * 512 for name in named)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return dict(zip(FIGURES, (status["VmRSS:"] / 1024, descriptors, status["Threads:"], shared / 1024), strict=False))


@dataclass(frozen=True)
class Growth:
    """A figure of a life: medians of a window after its warm-up, and of one at its end."""

    life: Life
    figure: str
    first: float
    last: float

    @property
    def share(self) -> float:
        return self.last / self.first - 1 if self.first else float(self.last > 0)


def growth_of(lives: Sequence[Life], warm_s: float, window_s: float) -> list[Growth]:
    """Return the growth of each life that lasted for its warm-up and two windows."""
    found = []
    for life in lives:
        begin, end = life.times[0] + warm_s, life.times[-1]
        if end - begin >= 2 * window_s:
            for figure in GROWING:
                first, last = life.middle(figure, begin, begin + window_s), life.middle(figure, end - window_s, end)
                found.append(Growth(life, figure, first, last))
    return found


def table(growths: Sequence[Growth], lives: Sequence[Life]) -> str:
    """Return the figures of the lives that were judged, one line each, and how many were too short."""
    rows = [f"{'process':<16}" + "".join(f"{figure:>26}" for figure in GROWING)]
    judged = dict.fromkeys(id(one.life) for one in growths)
    for life in lives:
        mine = [one for one in growths if one.life is life]
        if mine:
            cells = (f"{one.first:.10g} -> {one.last:.10g} {one.share:+.2%}" for one in _rounded(mine))
            rows.append(f"{life.name:<16}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join([*rows, f"{len(lives) - len(judged)} lives were too short to be judged"])


def _rounded(growths: Sequence[Growth]) -> list[Growth]:
    return [Growth(one.life, one.figure, round(one.first, 1), round(one.last, 1)) for one in growths]


def draw(lives: Sequence[Life], path: Path) -> None:
    """Draw every figure of every life over time."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(FIGURES), 1, figsize=(11, 3 * len(FIGURES)), sharex=True)
    names = sorted({life.name for life in lives})
    for panel, what in zip(panels, FIGURES, strict=True):
        for life in lives:
            times = [time_s / 60 for time_s in life.times]
            panel.plot(times, life.values[what], color=f"C{names.index(life.name)}", linewidth=1)
        panel.set_title(what, loc="left")
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("minutes")
    handles = [pyplot.Line2D([], [], color=f"C{number}", label=name) for number, name in enumerate(names)]
    figure.legend(handles=handles, loc="upper center", ncols=6, frameon=False)
    figure.savefig(path)
    pyplot.close(figure)

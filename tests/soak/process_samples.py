"""What processes hold, sampled again and again: read from /proc, judged for growth, drawn as SVG. Starts nothing.

A life is one process of a node: a node that was killed and started again has several. Each is compared with itself,
and only at times at which all its peers were there: a peer costs descriptors, threads and mapped memory while it lives.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

FIGURES = ("resident MiB", "descriptors", "threads", "shared KiB", "regions", "pages out")
GROWING = FIGURES[:5]
"""What must not grow; pages that are out follow the load, and must all be back at the end."""
MOST_GROWTH = 0.01


@dataclass
class Life:
    """One process: `times` in seconds since the soak began, and `values` of each figure at these times.

    `calm` has the numbers of those samples before which all nodes had been there for a while; `opened` what its
    descriptors were at each sample.
    """

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    calm: list[int] = field(default_factory=list)
    opened: list[Counter[str]] = field(default_factory=list)

    def add(
        self, time_s: float, figures: Mapping[str, float], opened: Counter[str] | None = None, *, calm: bool = True
    ) -> None:
        if calm:
            self.calm.append(len(self.times))
        self.times.append(time_s)
        self.opened.append(opened or Counter())
        for name in FIGURES:
            self.values.setdefault(name, []).append(figures.get(name, 0.0))

    def quartiles(self, figure: str, samples: Sequence[int]) -> list[float]:
        """Return the quartiles of a figure in these samples."""
        return quantiles((self.values[figure][number] for number in samples), n=4, method="inclusive")

    def opened_since(self, warm_s: float) -> Counter[str]:
        """Return the descriptors by which the last calm sample has more than the first one after the warm-up."""
        warm = [number for number in self.calm if self.times[number] >= self.times[0] + warm_s]
        return self.opened[warm[-1]] - self.opened[warm[0]] if warm else Counter()


def read_descriptors(pid: int) -> Counter[str]:
    """Return what the descriptors of a process are, numbers left out; raises OSError when it has ended."""
    opened: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            opened[re.sub(r"\d+", "N", os.readlink(f"/proc/{pid}/fd/{name}"))] += 1
    return opened


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
    """A figure of a life: its quartiles in the first calm samples after the warm-up, and in the last ones."""

    life: Life
    figure: str
    firsts: Sequence[float]
    lasts: Sequence[float]

    @property
    def first(self) -> float:
        return self.firsts[1]

    @property
    def last(self) -> float:
        return self.lasts[1]

    @property
    def share(self) -> float:
        """Return by which share all quartiles grew at least.

        What is kept raises all of them. What comes and goes, a thread that waits for work, moves the median alone.
        """
        return min(_share(first, last) for first, last in zip(self.firsts, self.lasts, strict=True))


def _share(first: float, last: float) -> float:
    return last / first - 1 if first else float(last > 0)


def growth_of(lives: Sequence[Life], warm_s: float, samples: int) -> list[Growth]:
    """Return the growth of each life with so many calm samples after its warm-up, and as many more at its end."""
    found = []
    for life in lives:
        warm = [number for number in life.calm if life.times[number] >= life.times[0] + warm_s]
        if len(warm) >= 2 * samples:
            for figure in GROWING:
                first, last = life.quartiles(figure, warm[:samples]), life.quartiles(figure, warm[-samples:])
                found.append(Growth(life, figure, first, last))
    return found


def overlooked(lives: Sequence[Life], growths: Sequence[Growth], least_s: float) -> list[Life]:
    """Return the lives of at least so many seconds that nobody judged: too seldom all nodes were there."""
    judged = {id(one.life) for one in growths}
    return [life for life in lives if id(life) not in judged and life.times[-1] - life.times[0] >= least_s]


def table(growths: Sequence[Growth], lives: Sequence[Life]) -> str:
    """Return the figures of the lives that were judged, one line each, and how many were too short."""
    rows = [f"{'process':<16}" + "".join(f"{figure:>26}" for figure in GROWING)]
    judged = dict.fromkeys(id(one.life) for one in growths)
    for life in lives:
        mine = [one for one in growths if one.life is life]
        if mine:
            cells = (f"{one.first:.5g} -> {one.last:.5g} {one.share:+.2%}" for one in mine)
            rows.append(f"{life.name:<16}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join([*rows, f"{len(lives) - len(judged)} lives were too short to be judged"])


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

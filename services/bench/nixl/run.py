"""`bench nixl`: our NIXL face, our bare calls and the real NIXL in turn, two processes each, on the same work.

Times are until the initiator knows, and where a figure is answered, until the target's program knew and its answer came
back. All three start and poll the same way; the handles and lists of NIXL and of the face are made beforehand.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

from asyncfabric.bench.measure import paired_ratio, significant
from asyncfabric.bench.rows import Point, rates
from asyncfabric_services.bench.nixl.figures import Figure, Workplace, figures_of
from asyncfabric_services.bench.nixl.moving_worker import Operation
from asyncfabric_services.bench.nixl.worker import FACE, INSTALLED_NAMES, installed_nixl
from asyncfabric_services.bench.options import Options
from asyncfabric_services.bench.pair import BenchPair
from asyncfabric_services.bench.race import Contender, race, speed_ratio
from asyncfabric_services.bench.report.report import BenchReport

LISTS = 4
"""Page lists that take turns, each other pages."""


class NixlSide:
    """One contender: its two processes, and one figure prepared in them."""

    def __init__(self, name: str, pair: BenchPair, options: Options, place: Workplace, **how: str) -> None:
        """Open both ends and let them know each other."""
        self.name = name
        self._pair, self._seed = pair, options.seed
        ends = (pair.initiator, pair.target)
        for end, there in zip(ends, place.ends(options.region_bytes), strict=True):
            end.start("open", place=there, **how)
        cards = [end.finish() for end in ends]
        for end, card in zip(ends, reversed(cards), strict=True):
            end.call("meet", **card)

    def prepare(self, figure: Figure, operation: Operation, slots: int) -> str:
        """Make the moves, do each once and compare every byte; "" is good."""
        begin, end = self._pair.initiator, self._pair.target
        if operation == "READ":
            begin, end = end, begin
        begin.call("fill", seed=self._seed)
        end.call("poison")
        lists = {"page_bytes": figure.op_bytes, "count": figure.pages, "list_seed": self._seed}
        if figure.pages:
            self._pair.initiator.call("prepare_pages", operation=operation, lists=LISTS, **lists)
        else:
            self._pair.initiator.call(
                "prepare_writes", operation=operation, op_bytes=figure.op_bytes, slots=slots, count=figure.window
            )
        self._run(LISTS if figure.pages else slots)
        if figure.pages:
            return str(end.call("check_pages", seed=self._seed, rounds=LISTS, **lists))
        return str(end.call("check_prefix", seed=self._seed, written=slots * figure.op_bytes))

    def _run(self, count: int, window: int = 1, note: bool = False, each: bool = False, worth: int = 1) -> float:
        self._pair.target.start("answer", count=count, note=note, each=each, worth=worth)
        seconds = self._pair.initiator.call("run", count=count, window=window, note=note, each=each)
        self._pair.target.finish()
        return float(seconds)

    def contender(self, figure: Figure, operation: Operation) -> Contender:
        """Return the moves as a loop under measurement."""
        worth = (figure.pages or 1) if operation == "WRITE" else 1

        def repeat(count: int) -> float:
            return self._run(count, figure.window, figure.note, figure.each, worth)

        return Contender(self.name, repeat)


def run_nixl(options: Options, report: BenchReport, places: Sequence[Workplace]) -> None:
    """Measure each figure of the tables of all places, one place after the other."""
    real = installed_nixl()
    if real is None:
        report.note(
            f"NIXL is left out: none of {', '.join(INSTALLED_NAMES)} can be imported here. `make doors` makes an "
            "environment with it: build/doors/venv/bin/python -m asyncfabric_services bench nixl"
        )
    for place in places:
        report.expect(len(figures_of(place, options)) * len(place.operations))
    for place in places:
        run_place(options, report, place, real)


def run_place(options: Options, report: BenchReport, place: Workplace, real: str | None) -> None:
    """Measure each figure of one place for each operation, with pairs of processes of its own."""
    with ExitStack() as stack:

        def side(name: str, kind: Literal["nixl", "nixl-bare"], **how: str) -> NixlSide:
            return NixlSide(name, stack.enter_context(BenchPair(kind, options.deadline_at)), options, place, **how)

        sides = [side("bare", "nixl-bare"), side("face", "nixl", module=FACE)]
        if real is not None:
            sides.append(side("nixl", "nixl", module=real))
        for operation in place.operations:
            for figure in figures_of(place, options):
                report.step(f"{place.name}: {operation} of {figure.text}")
                measure(options, report, place, sides, figure, operation)


def measure(
    options: Options,
    report: BenchReport,
    place: Workplace,
    sides: Sequence[NixlSide],
    figure: Figure,
    operation: Operation,
) -> None:
    """Check the bytes of one figure, race the contenders, publish their rows."""
    slots = max(1, min(figure.window, options.region_bytes // figure.op_bytes))
    verdicts = {side.name: side.prepare(figure, operation, slots) for side in sides}
    field = {side.name: side.contender(figure, operation) for side in sides}
    race(list(field.values()), repeats=options.repeats, duration=options.duration, count=options.count)
    bare, nixl = field["bare"], field.get("nixl")
    for name, one in field.items():
        verified = report.check(f"{name}: {operation} of {figure}", verdicts[name])
        limit = nixl if nixl is not None and one is not nixl else None
        detail: dict[str, Any] = {
            "operation": operation.lower(),
            "memory": "/".join(sorted(set(place.memories))),
            "rails": ",".join(place.rails),
            "namespaces": place.namespaces[0] is not None,
            "polls": "spin" if place.spins else "yield",
            "us": significant(statistics.median(one.costs) * 1e6),
        }
        if name == "face":
            extra = statistics.median(mine - theirs for mine, theirs in zip(one.costs, bare.costs, strict=True))
            detail |= {"over_bare": paired_ratio(one.costs, bare.costs), "over_bare_us": significant(extra * 1e6)}
        ratio = None if limit is None else speed_ratio(one, limit)
        if name == "face" and figure.demanded is not None:
            detail["demanded"] = figure.demanded
            if ratio is not None and ratio < figure.demanded:
                report.note(f"{place.name}, {operation} of {figure.text}: {ratio:.2f} of NIXL, for {figure.demanded:g}")
        gbytes, ops = rates(one.seconds, one.count, one.count * figure.moved_bytes)
        report.row(
            Point(
                bench="nixl",
                figure=f"{operation.lower()}-{figure.name}",
                provider=name,
                bytes=figure.op_bytes,
                pages=figure.pages or 1,
                window=figure.window,
                gbytes_per_s=gbytes,
                ops_per_s=ops,
                p50_us=detail["us"],
                verified=verified,
                limit=None if limit is None else "nixl",
                ratio=ratio,
                detail=detail,
            )
        )

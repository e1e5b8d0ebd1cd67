"""Dispatch and combine between GPUs of several nodes on a virtual clock: rails and node ports shared fairly. Pure.

A fluid model. Every write of a lane begins when its sender has packed it, and those of one sender and receiver go one
after the other. A rank goes on with a part of the tokens once all members' writes of it have arrived: the rule of the
exchange. Kernels that pack, place and add take their time before and after; they never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.sim.moe_assumptions import MoeAssumptions
from asyncfabric.sim.moe_workload import Floats, LaneLoad, load_of, random_choices
from asyncfabric.sim.rails import share

Writes = list[Floats]
"""Matrices of bytes from sender to receiver, those of one pair in this order."""


@dataclass(frozen=True, slots=True)
class MoePrediction:
    """A predicted step, of the slowest rank; medians over several random routings. Microseconds and bytes.

    Attributes:
        dispatch_us, combine_us: from the first kernel to the rows at the experts, and back to the sums.
        dispatch_floor_us, combine_floor_us: the busiest port's bytes at the rail's nominal rate.
        rail_bytes: what the busiest rank receives over its rail in a dispatch, and in a combine.
        writes: of all ranks in a dispatch.
    """

    dispatch_us: float
    combine_us: float
    dispatch_floor_us: float
    combine_floor_us: float
    rail_bytes: tuple[int, int]
    writes: int
    assumed: MoeAssumptions

    def summary(self) -> dict[str, Any]:
        """Return plain values: times, bytes, assumptions."""
        return {
            "dispatch_us": round(self.dispatch_us, 1),
            "combine_us": round(self.combine_us, 1),
            "dispatch_floor_us": round(self.dispatch_floor_us, 1),
            "combine_floor_us": round(self.combine_floor_us, 1),
            "dispatch_rail_bytes": self.rail_bytes[0],
            "combine_rail_bytes": self.rail_bytes[1],
            "dispatch_writes": self.writes,
            "assumptions": msgspec.to_builtins(self.assumed),
        }


def predict_moe(
    config: MoeConfig, shapes: Sequence[LaneShape], assumed: MoeAssumptions | None = None, *, routings: int = 5
) -> MoePrediction:
    """Return what dispatching and combining `max_tokens` tokens of each rank would take.

    Args:
        config: of one part of the tokens: `max_tokens` of the step divided by `assumed.pieces`.
        shapes: of the lanes of that config, as `asyncfabric.moe.host.session.plan_lanes` gives them.
        assumed: what is taken for granted.
        routings: random routings that are tried.

    Raises:
        ValueError: parts do not fit into one pass.
    """
    assumed = assumed or MoeAssumptions()
    found: dict[str, list[float]] = {"there": [], "back": [], "there_floor": [], "back_floor": []}
    sizes, writes = (0, 0), 0
    for seed in range(routings):
        parts = [load_of(config, shapes, random_choices(config, seed * 64 + part)) for part in range(assumed.pieces)]
        on_rail = _on_rail(config, assumed)
        there = sum((lane.first + lane.rest) * on_rail for part in parts for lane in part)
        back = sum(lane.back * on_rail for part in parts for lane in part)
        sizes = (_busiest(np.asarray(there)), _busiest(np.asarray(back)))
        writes = sum(lane.writes for part in parts for lane in part)
        nominal = assumed.rail_gbits_per_s / 8 * 1e3
        found["there"].append(_dispatch(config, shapes, parts, on_rail, assumed))
        found["back"].append(_combine(config, shapes, parts, on_rail, assumed))
        found["there_floor"].append(sizes[0] / nominal)
        found["back_floor"].append(sizes[1] / nominal)
    values = {name: median(each) for name, each in found.items()}
    return MoePrediction(
        values["there"], values["back"], values["there_floor"], values["back_floor"], sizes, writes, assumed
    )


def _on_rail(config: MoeConfig, assumed: MoeAssumptions) -> NDArray[np.bool_]:
    node = np.arange(config.ranks) // (config.node_size if config.node_size > 1 else assumed.node_ranks)
    return np.asarray(node[:, None] != node)


def _busiest(moved: Floats) -> int:
    return int(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def _dispatch(
    config: MoeConfig,
    shapes: Sequence[LaneShape],
    parts: list[list[LaneLoad]],
    on_rail: NDArray[np.bool_],
    assumed: MoeAssumptions,
) -> float:
    ready = np.zeros((len(parts), config.ranks))
    for number, shape in enumerate(shapes):
        loads = [part[number] for part in parts]
        work = np.stack([load.rows.sum(axis=1) for load in loads]) * 2.0 * shape.row_bytes
        packed = _after_kernel(ready, work, assumed) + assumed.proxy_us * (number == 0)
        first = _Carried([load.first for load in loads], [load.joined for load in loads], on_rail, packed, assumed)
        if any(load.rest.any() for load in loads):  # only once the records of all ranks are there
            rest = [load.rest for load in loads]
            later = _Carried(rest, [each > 0 for each in rest], on_rail, first.arrived, assumed)
            ready = np.maximum(first.arrived, later.arrived)
        else:
            ready = first.arrived
    placed = np.stack([part[-1].rows.sum(axis=0) for part in parts]) * 2.0 * shapes[-1].row_bytes
    return float(_after_kernel(ready, placed, assumed).max())


def _combine(
    config: MoeConfig,
    shapes: Sequence[LaneShape],
    parts: list[list[LaneLoad]],
    on_rail: NDArray[np.bool_],
    assumed: MoeAssumptions,
) -> float:
    ready = np.zeros((len(parts), config.ranks))
    for number in reversed(range(len(shapes))):
        loads = [part[number] for part in parts]
        # What goes back is read, added up and written once; a row has the outputs of one to two experts here.
        work = np.stack([load.rows.sum(axis=0) for load in loads]) * 3.0 * shapes[number].back_row_bytes
        packed = _after_kernel(ready, work, assumed) + assumed.proxy_us * (number == 0)
        joined = [load.joined for load in loads]
        ready = _Carried([load.back for load in loads], joined, on_rail, packed, assumed).arrived
    added = np.stack([part[0].rows.sum(axis=1) for part in parts]) * 2.0 * shapes[0].back_row_bytes
    return float(_after_kernel(ready, added, assumed).max())


def _after_kernel(ready: Floats, work_bytes: Floats, assumed: MoeAssumptions) -> Floats:
    """Return when a kernel has done its work for each part: the parts of one rank one after the other."""
    took = assumed.launch_us + work_bytes / (assumed.memory_gbytes_per_s * 1e3)
    done = np.zeros_like(ready)
    last = np.zeros(ready.shape[1])
    for part in range(len(ready)):
        last = np.maximum(ready[part], last) + took[part]
        done[part] = last
    return done


class _Carried:
    """Writes of all parts over rails and ports; `arrived` (parts, ranks): when a rank has all it gets of a part."""

    def __init__(
        self,
        writes: Writes,
        joined: Sequence[NDArray[np.bool_]],
        on_rail: NDArray[np.bool_],
        ready: Floats,
        assumed: MoeAssumptions,
    ) -> None:
        rates = {True: assumed.rail_bytes_per_us, False: assumed.node_bytes_per_us}
        least = np.where(on_rail, assumed.message_us * rates[True], 1.0)
        left = [np.where(pairs, np.maximum(each, least), 0.0) for each, pairs in zip(writes, joined, strict=True)]
        ended = [np.where(pairs, np.inf, 0.0) for pairs in joined]
        ranks, now = len(on_rail), 0.0
        ports = {rail: np.full(ranks, rate * assumed.step_us) for rail, rate in rates.items()}
        while any(each.any() for each in left):
            now += assumed.step_us
            taken = np.zeros((ranks, ranks), dtype=bool)
            waiting, turn = np.zeros((ranks, ranks)), np.full((ranks, ranks), -1)
            for part, each in enumerate(left):
                heads = (each > 0) & ~taken
                taken |= heads  # a later part waits behind it, ready or not
                begun = heads & (ready[part][:, None] < now)
                waiting[begun], turn[begun] = each[begun], part
            for rail, port in ports.items():
                moved = share(waiting * (on_rail == rail), port, port)
                for part, each in enumerate(left):
                    each -= moved * (turn == part)
                    done = (turn == part) & (each < 1.0) & (ended[part] == np.inf) & (on_rail == rail)
                    each[done], ended[part][done] = 0.0, now
        after = np.where(on_rail, assumed.latency_us + assumed.notify_us, assumed.node_latency_us)
        self.arrived: Floats = np.stack(
            [
                np.maximum((when + after * pairs).max(axis=0), own)
                for when, pairs, own in zip(ended, joined, ready, strict=True)
            ]
        )

"""`plan moe`: predictions of dispatch and combine for several numbers of ranks, by the nodes and straight; as tables.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from asyncfabric.moe import MoeConfig
from asyncfabric.moe.host.session import plan_lanes
from asyncfabric.sim.calibration import Calibration
from asyncfabric.sim.moe import MoePrediction, predict_moe
from asyncfabric.sim.moe_assumptions import MoeAssumptions
from asyncfabric_services.plan.calibrated import source_lines

PUBLISHED_US: dict[int, tuple[float, float]] = {64: (187.5, 309.1)}
"""Dispatch and combine of 128 tokens, hidden 7168, top-8 of 256, fp8 there and bf16 back, on ConnectX-7 with H100s, one
row for each rank that a token goes to: fabric-lib, arXiv 2510.27656."""


class Row(msgspec.Struct, frozen=True):
    """One prediction: `node_size` is 1 where tokens go straight to each rank."""

    ranks: int
    node_size: int
    predicted: MoePrediction


def exchange_rows(config: MoeConfig, rank_counts: tuple[int, ...], assumed: MoeAssumptions, routings: int) -> list[Row]:
    """Predict each number of ranks, by nodes of `config.node_size` and straight.

    Raises:
        ValueError: tokens that do not divide into the parts, or ranks into nodes; parts that take several passes.
    """
    if config.max_tokens % assumed.pieces:
        raise ValueError(f"{config.max_tokens} tokens do not divide into {assumed.pieces} parts of equal length")
    part = config.max_tokens // assumed.pieces
    rows = []
    for ranks in rank_counts:
        for node_size in dict.fromkeys((config.node_size, 1)):
            shape = replace(config, ranks=ranks, node_size=node_size, max_tokens=part, in_flight=max(2, assumed.pieces))
            lanes = [lane.shape for lane in plan_lanes(shape, 0, range(ranks))]
            rows.append(Row(ranks, node_size, predict_moe(shape, lanes, assumed, routings=routings)))
    return rows


def summary(config: MoeConfig, rows: list[Row], assumed: MoeAssumptions) -> dict[str, object]:
    """Return plain values; those that scripts rely on are `rows` and `assumptions`."""
    listed = []
    for row in rows:
        plain = row.predicted.summary()
        del plain["assumptions"]
        listed.append({"ranks": row.ranks, "node_size": row.node_size, **plain})
    names = ("max_tokens", "hidden", "top_k", "num_experts", "in_dtype", "scale_block", "out_dtype")
    return {
        **{name: getattr(config, name) for name in names},
        "rows": listed,
        "assumptions": msgspec.to_builtins(assumed),
    }


def draw_rows(
    config: MoeConfig, rows: list[Row], assumed: MoeAssumptions, measured: dict[str, Any], found: Calibration | None
) -> str:
    """Return the tables: what, how long, and what was assumed or measured."""
    table = _lines(config, rows)
    return "\n".join([*table, *source_lines(msgspec.to_builtins(assumed), measured, found)])


def _lines(config: MoeConfig, rows: list[Row]) -> Iterator[str]:
    yield (
        f"{config.max_tokens} tokens of each rank, hidden {config.hidden}, top-{config.top_k} of {config.num_experts} "
        f"experts, {config.in_dtype} there, {config.out_dtype} back; the slowest rank, microseconds"
    )
    yield ""
    heads = f"{'dispatch':>9} {'its floor':>10} {'combine':>9} {'its floor':>10}"
    yield f"{'ranks':>5}  {'tokens cross':<16} {heads}  published"
    for row in rows:
        found = row.predicted
        how = "once a node" if row.node_size > 1 else "once a rank"
        published = PUBLISHED_US.get(row.ranks) if row.node_size == 1 else None
        yield (
            f"{row.ranks:>5}  {how:<16} {found.dispatch_us:>9.1f} {found.dispatch_floor_us:>10.1f} "
            f"{found.combine_us:>9.1f} {found.combine_floor_us:>10.1f}  "
            f"{' / '.join(map(str, published)) if published else '-'}"
        )
    yield ""
    yield "floor: the bytes of the busiest port at the rail's nominal rate. Nothing of this was run"

"""Predictions of dispatch and combine: bytes are those of the exchange, times obey rails, the command prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from asyncfabric.moe import MoeConfig
from asyncfabric.moe.host.session import plan_lanes
from asyncfabric.moe.host.traffic import step_traffic
from asyncfabric.sim import MoeAssumptions, MoePrediction, predict_moe
from asyncfabric.sim.moe_workload import LaneLoad, load_of, random_choices
from asyncfabric_services.plan.command import plan

DECODE: dict[str, Any] = {
    "num_experts": 256,
    "top_k": 8,
    "hidden": 7168,
    "max_tokens": 32,
    "ranks": 16,
    "in_dtype": "float8_e4m3fn",
    "scale_block": 128,
    "in_flight": 4,
}


def loads(config: MoeConfig, seed: int = 1) -> list[LaneLoad]:
    shapes = [lane.shape for lane in plan_lanes(config, 0, range(config.ranks))]
    return load_of(config, shapes, random_choices(config, seed))


def predicted(config: MoeConfig, **assumed: Any) -> MoePrediction:
    shapes = [lane.shape for lane in plan_lanes(config, 0, range(config.ranks))]
    return predict_moe(config, shapes, MoeAssumptions(**assumed), routings=1)


@pytest.mark.parametrize("private", [None, 3, 0])
def test_bytes_and_writes_are_those_that_the_exchange_is_held_to(private: int | None) -> None:
    """`step_traffic` is compared with the engine's counters where steps are run."""
    config = MoeConfig(**(DECODE | {"hidden": 128, "ranks": 8, "private_tokens": private}))
    indices = random_choices(config, 1)
    (load,) = loads(config)
    traffic = [step_traffic(config, indices, rank) for rank in range(config.ranks)]
    assert load.writes == sum(each.dispatch_writes for each in traffic)
    for rank, each in enumerate(traffic):
        assert (load.first + load.rest)[rank].sum() == each.dispatch_bytes
        assert load.back[rank].sum() == each.combine_bytes


def test_by_the_nodes_a_token_crosses_once_and_reaches_each_rank_that_has_its_experts() -> None:
    config = MoeConfig(**(DECODE | {"node_size": 4}))
    across, inside = loads(config)
    straight = random_choices(config, 1)
    node_of = np.arange(256) // (256 // config.nodes)
    for rank, chosen in enumerate(straight):
        crossed = sum(len(set(node_of[token])) for token in chosen)
        assert across.rows[rank].sum() == crossed
        assert not across.rows[rank, np.arange(config.ranks) % 4 != rank % 4].any()
    of_rank = np.arange(256) // (256 // config.ranks)
    arrive = np.bincount(
        [rank for chosen in straight for token in chosen for rank in set(of_rank[token])], minlength=16
    )
    assert inside.rows.sum(axis=0).tolist() == arrive.tolist()
    assert not np.diag(inside.first).any() and not np.diag(across.back).any()


def test_times_obey_the_rails() -> None:
    config = MoeConfig(**DECODE)
    nodes = replace(config, node_size=8)
    straight, by_nodes = predicted(config), predicted(nodes)
    for found in (straight, by_nodes):
        assert found.dispatch_us > found.dispatch_floor_us > 0 and found.combine_us > found.combine_floor_us > 0
    assert by_nodes.rail_bytes < straight.rail_bytes
    slower, slow_node = predicted(nodes, rail_gbits_per_s=200.0), predicted(nodes, node_gbytes_per_s=50.0)
    assert slower.dispatch_us > by_nodes.dispatch_us + by_nodes.dispatch_floor_us * 0.9
    assert slow_node.combine_us > by_nodes.combine_us
    bare: dict[str, Any] = {
        "launch_us": 0.0,
        "proxy_us": 0.0,
        "latency_us": 0.0,
        "notify_us": 0.0,
        "message_us": 0.0,
        "node_latency_us": 0.0,
        "memory_gbytes_per_s": 1e9,
        "node_gbytes_per_s": 1e6,
        "rail_efficiency": 1.0,
    }
    ideal = predicted(config, **bare)
    assert ideal.dispatch_floor_us <= ideal.dispatch_us <= ideal.dispatch_floor_us * 1.15 + 1.0


@pytest.mark.slow
def test_a_decode_of_64_ranks_by_the_nodes_is_predicted_below_what_was_asked_for() -> None:
    """And straight, in one part, near what is published of such a run: 187.5 and 309.1 us."""
    config = MoeConfig(**(DECODE | {"ranks": 64}))
    by_nodes = predicted(replace(config, node_size=8))
    assert by_nodes.dispatch_us <= 130 and by_nodes.combine_us <= 240
    straight = predicted(replace(config, max_tokens=128), pieces=1)
    assert abs(straight.dispatch_us / 187.5 - 1) < 0.15 and abs(straight.combine_us / 309.1 - 1) < 0.15


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan, ["moe", "--ranks", "16", "--routings", "1", *arguments])


def test_the_command_prints_times_and_every_assumption() -> None:
    result = run("--json", "--assume", "latency_us=30")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(row["ranks"], row["node_size"]) for row in found["rows"]] == [(16, 8), (16, 1)]
    assert found["assumptions"] == msgspec.to_builtins(MoeAssumptions(latency_us=30.0))
    assert found["rows"][0]["dispatch_us"] > 60
    text = run().output
    assert all(name in text for name in ("once a node", "proxy_us", "pieces"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tokens", "130"], "do not divide into 4 parts"),
        (["--node-size", "5"], "multiple of node_size"),
        (["--assume", "rail_efficiency=2"], "at most 1"),
        (["--assume", "speed=2"], "expected NAME=VALUE"),
        (["--assume", "proxy_us=-1"], "must not be negative"),
    ],
)
def test_numbers_that_do_not_fit_are_usage_errors(arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and text in result.output

"""Which trainer and which replicas a few numbers mean: what the user does not state is chosen as people do. Pure."""

from __future__ import annotations

from typing import NamedTuple

import click

from asyncfabric.weights.plan.cards import ModelCard
from asyncfabric.weights.plan.layouts import ReplicaLayout, TrainerLayout

REPLICA_RANKS = {"kimi-k2": 32, "deepseek-v3": 32, "qwen3-235b-a22b": 16, "llama-3.1-70b": 8, "tiny": 2}
NODE_RANKS = 8
FSDP_MOST = 16


class PlannedCluster(NamedTuple):
    """The two sides, and how many replicas there are."""

    trainer: TrainerLayout
    replica: ReplicaLayout
    replicas: int


def cluster(
    card: ModelCard,
    *,
    train: int,
    infer: int,
    stages: int | None,
    fsdp: int | None,
    ep: int | None,
    replica_ranks: int | None,
    tp: int | None,
    fp8: bool,
) -> PlannedCluster:
    """Return the layouts; raises click.UsageError when the numbers do not divide."""
    stages = stages or (2 if train % 2 == 0 and train >= 2 * NODE_RANKS else 1)
    ep = ep or _largest(NODE_RANKS, train // stages, card.experts)
    fsdp = fsdp or _largest(FSDP_MOST, train // stages // ep)
    copies, rest = divmod(train, stages * fsdp * ep)
    if rest or not copies:
        raise click.UsageError(f"--train {train} is no multiple of {stages} stages x fsdp {fsdp} x ep {ep}")
    ranks = replica_ranks or _largest(REPLICA_RANKS[card.name], infer)
    replicas, rest = divmod(infer, ranks)
    if rest or not replicas:
        raise click.UsageError(f"--infer {infer} is no multiple of {ranks} ranks of a replica")
    trainer = TrainerLayout(stages=stages, copies=copies, fsdp=fsdp, ep=ep)
    return PlannedCluster(
        trainer, ReplicaLayout(ranks=ranks, tp=tp or (1 if card.experts else ranks), fp8=fp8), replicas
    )


def _largest(most: int, *counts: int) -> int:
    """Return the largest number up to `most` that divides all counts; 0 is divided by all."""
    return next(number for number in range(max(1, most), 0, -1) if all(count % number == 0 for count in counts))

"""Usual ways to spread a model over a trainer and over a replica, turned into the moves between the two. Pure.

Trainer: pipeline stages, each a mesh (copies, fsdp, ep). Experts are dealt to the ep axis and each expert's matrices
are cut in rows along fsdp; all else is cut in rows along ep, that is inside a node, and repeated along fsdp. Replica:
experts dealt to all ranks; all else cut by tensor parallelism inside groups of `tp` ranks and repeated in each group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache

import msgspec
import numpy as np

from asyncfabric.weights.plan.boxes import Ints
from asyncfabric.weights.plan.cards import ModelCard, Parameter, parameters
from asyncfabric.weights.plan.formats import BLOCK
from asyncfabric.weights.plan.placement import Mesh, Placement, Shard, place
from asyncfabric.weights.plan.target import Move, Target, alone, fused, stacked


class TrainerLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the trainer's axes: `stages` pipeline stages, each of copies x fsdp x ep ranks."""

    stages: int = 1
    copies: int = 1
    fsdp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the trainer."""
        return self.stages * self.copies * self.fsdp * self.ep


class ReplicaLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: `ranks` share the experts, groups of `tp` all else; float8 in blocks or as the trainer has it."""

    ranks: int = 1
    tp: int = 1
    fp8: bool = False


def moves_between(card: ModelCard, trainer: TrainerLayout, replica: ReplicaLayout) -> list[Move]:
    """Return what brings a model from a trainer into a replica.

    Raises:
        ValueError: ranks do not divide experts, heads or groups; or blocks of 128 would be cut at the replica.
    """
    if replica.ranks % replica.tp or trainer.stages > card.layers:
        raise ValueError(f"tp must divide ranks, stages must not exceed {card.layers} layers: {replica}, {trainer}")
    for count in (trainer.ep, replica.ranks):
        if card.experts and card.experts % count:
            raise ValueError(f"{count} ranks cannot share {card.experts} experts of {card.name} evenly")
    spread = _Spread(card, trainer, replica)
    tensors: dict[tuple[str, int], list[Parameter]] = defaultdict(list)
    for parameter in parameters(card):
        tensors[parameter.fused or parameter.name, parameter.expert].append(parameter)
    moves = []
    for (region, _), parts in tensors.items():
        targets = spread.targets(tuple((part.shape, part.split) for part in parts), parts[0].expert)
        for part, target in zip(parts, targets, strict=True):
            eight = replica.fp8 and part.quantised
            to = "float8_e4m3fn" if eight else part.dtype
            moves.append(Move(part.name, part.dtype, spread.source(part), region, to, target, BLOCK if eight else 0))
    return moves


class _Spread:
    """Placements and targets of one pair of layouts; equal ones are made once."""

    def __init__(self, card: ModelCard, trainer: TrainerLayout, replica: ReplicaLayout) -> None:
        self.card, self.trainer = card, trainer
        self._place = lru_cache(maxsize=None)(self._placed)
        self.targets = ReplicaCuts(card, replica).targets

    def source(self, part: Parameter) -> Placement:
        layer = min(max(part.layer, 0), self.card.layers - 1)
        stage = layer * self.trainer.stages // self.card.layers
        ep = -1 if part.expert < 0 else part.expert * self.trainer.ep // self.card.experts
        return self._place(part.shape, stage, ep)

    def _placed(self, shape: tuple[int, ...], stage: int, ep: int) -> Placement:
        trainer = self.trainer
        first = stage * trainer.ranks // trainer.stages
        mesh = Mesh.of({"copies": trainer.copies, "fsdp": trainer.fsdp, "ep": trainer.ep}, first)
        if ep >= 0:
            return place(shape, mesh.at("ep", ep), {"fsdp": Shard(0)})
        return place(shape, mesh, {"ep": Shard(0)})


class ReplicaCuts:
    """What the ranks of a replica want of each parameter; equal answers are made once."""

    def __init__(self, card: ModelCard, replica: ReplicaLayout) -> None:
        self.card: ModelCard = card
        self.replica: ReplicaLayout = replica
        self.targets: Callable[..., list[Target]] = lru_cache(maxsize=None)(self._targets)

    def _targets(self, parts: tuple[tuple[tuple[int, ...], str], ...], expert: int) -> list[Target]:
        if expert >= 0:
            each = self.card.experts // self.replica.ranks
            mesh = Mesh.of({"ep": 1}, expert // each)
            whole = [place(shape, mesh) for shape, _ in parts]
            slot: Ints = np.array([expert % each], np.int64)
            return [stacked(target, slot, each) for target in fused(whole)]
        wanted = [self._cut(shape, split) for shape, split in parts]
        return fused(wanted) if len(wanted) > 1 else [alone(wanted[0])]

    def _cut(self, shape: tuple[int, ...], split: str) -> Placement:
        tp = self.replica.tp
        mesh = Mesh.of({"group": self.replica.ranks // tp, "tp": tp})
        if split == "none" or tp == 1:
            return place(shape, mesh)
        if split == "columns":
            return place(shape, mesh, {"tp": Shard(1)})
        heads = {"heads": self.card.heads, "kv_heads": self.card.kv_heads}.get(split, 0)
        if heads and tp > heads:  # each head is kept by several ranks
            ranks = mesh.ranks.reshape(-1)
            starts = np.zeros((len(ranks), len(shape)), np.int64)
            length = shape[0] // heads
            starts[:, 0] = ranks % tp * heads // tp * length
            return Placement(shape, ranks, starts, np.tile(np.array([length, *shape[1:]], np.int64), (len(ranks), 1)))
        if heads and heads % tp:
            raise ValueError(f"tp {tp} does not divide {heads} heads of {self.card.name}")
        return place(shape, mesh, {"tp": Shard(0)})

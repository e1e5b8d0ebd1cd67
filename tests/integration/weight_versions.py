"""Versions of small weights that every process of a test can make for itself, and what replicas serve of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from asyncfabric.weights import (
    Mesh,
    Move,
    Plan,
    Relay,
    ReplicaMemory,
    Shard,
    alone,
    execute,
    fused,
    place,
    plan_weights,
)
from asyncfabric.weights.update import receiver_name

TRAINERS, RECEIVERS = 2, 2
SHAPE = (512, 768)
NAMES = ("gate", "up", "down")


@cache
def plan_for(*replicas: str, relay: Relay | None = None) -> Plan:
    """Two fused matrices, quantised, and one that is copied as it is; FSDP to TP, in small pieces."""
    trainer, replica = Mesh.of({"fsdp": TRAINERS}), Mesh.of({"tp": RECEIVERS})
    held, split = place(SHAPE, trainer, {"fsdp": Shard(0)}), {"tp": Shard(0)}
    gate_up = fused([place(SHAPE, replica, split), place(SHAPE, replica, split)])
    moves = [
        Move(name, "bfloat16", held, "gate_up", "float8_e4m3fn", target, 128)
        for name, target in zip(NAMES, gate_up, strict=False)
    ]
    moves.append(Move("down", "bfloat16", held, "down", "bfloat16", alone(place(SHAPE, replica, {"tp": Shard(1)}))))
    return plan_weights(
        moves, trainers=TRAINERS, receivers=RECEIVERS, replicas=replicas, relay=relay, chunk_bytes=1 << 14
    )


def shard(rank: int, name: str, version: int) -> Any:
    """Return what a trainer holds of a version: its rows of a matrix of bfloat16."""
    values = np.random.default_rng([version, *name.encode()]).standard_normal(SHAPE).astype(np.float32)
    rows = SHAPE[0] // TRAINERS
    return (values.view(np.uint32) >> 16).astype("<u2")[rank * rows : (rank + 1) * rows].copy()


def digest(tensors: Mapping[str, Any]) -> int:
    """Return a checksum of the bytes of all tensors."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8), found)
    return found


@cache
def digests(version: int, replica: str) -> dict[str, int]:
    """Return what the receivers of a replica have to serve, as the reference executor writes it."""
    plan = plan_for(replica)
    memory = ReplicaMemory(plan)
    execute(plan, lambda rank, name: shard(rank, name, version), memory)
    held: dict[str, dict[str, Any]] = {}
    for (_, receiver, name), tensor in memory.tensors.items():
        held.setdefault(receiver_name(replica, receiver), {})[name] = tensor
    return {name: digest(tensors) for name, tensors in held.items()}

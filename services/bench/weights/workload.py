"""The model of `bench weights`: square matrices from FSDP shards to tensor parallel ranks, rows and columns in turn.

Values from a seed, made the same in every process; bits are random, but of finite numbers of moderate size.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from asyncfabric.weights import CHUNK_BYTES, Mesh, Move, Plan, Relay, Shard, alone, place, plan_weights

Form = Literal["copy", "cast", "fp8"]
FORMS: dict[str, tuple[str, str, int]] = {
    "copy": ("bfloat16", "bfloat16", 0),
    "cast": ("float32", "bfloat16", 0),
    "fp8": ("bfloat16", "float8_e4m3fn", 128),
}
"""By name: the type at the trainer, the type at the replica, the block."""


def plan_of(
    trainers: int, receivers: int, replicas: int, matrices: int, side: int, form: str, chunk_bytes: int = CHUNK_BYTES,
    chain: bool = False,
) -> Plan:  # fmt: skip
    """Return the plan; every other matrix is cut in columns at the replica, where runs are short.

    `chain`: trainers feed the first replica, and each replica the next one.
    """
    trainer, replica = Mesh.of({"fsdp": trainers}), Mesh.of({"tp": receivers})
    source = place((side, side), trainer, {"fsdp": Shard(0)})
    dtype, to, block = FORMS[form]
    targets = [alone(place((side, side), replica, {"tp": Shard(dim)})) for dim in (0, 1)]
    moves = [
        Move(f"matrix {number}", dtype, source, f"matrix {number}", to, targets[number % 2], block)
        for number in range(matrices)
    ]
    names = [f"replica {number}" for number in range(replicas)]
    return plan_weights(
        moves, trainers=trainers, receivers=receivers, replicas=names, relay=Relay(0, 1) if chain else None,
        chunk_bytes=chunk_bytes,
    )  # fmt: skip


def rows_at(rank: int, trainers: int, side: int) -> tuple[int, int]:
    """Return the rows that a trainer holds, as (first, end): FSDP2 gives each the same number but the last ones."""
    each = -(-side // trainers)
    return min(side, rank * each), min(side, (rank + 1) * each)


def rows_of(number: int, side: int, begin: int, end: int, seed: int, form: str) -> Any:
    """Return rows of a matrix as the trainer stores them."""
    source = np.random.Philox(key=[seed, number])
    steps, skipped = divmod(begin * side, 16)  # 4 numbers of 64 bits a step, 4 elements each
    source.advance(steps)
    bits = np.random.Generator(source).integers(0, 1 << 16, skipped + (end - begin) * side, dtype=np.uint16)[skipped:]
    bits &= np.uint16(0x83FF)
    bits |= np.uint16(0x3C00)  # sizes from 2**-7 to 2
    if FORMS[form][0] == "float32":
        return (bits.astype(np.uint32) << 16 | 0x4321).view(np.float32).reshape(-1, side)
    return bits.reshape(-1, side)


def mixed_rows(numbers: Any, number: int, side: int, begin: int, end: int, seed: int, form: str) -> Any:
    """Return other weights of the same kind, which GPUs can make too: as bits, from where an element stands.

    `numbers` makes int64 numbers from a first one to an end, of numpy or of torch, and what comes out is of the same;
    the others are as in `rows_of`.
    """
    mixed = numbers(begin * side, end * side) + (number + 1) * 0x3C6EF372 + seed * 0x5BD1E995
    mixed = (mixed * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    bits = ((mixed >> 13) & 0x83FF) | 0x3C00
    return bits << 16 | 0x4321 if FORMS[form][0] == "float32" else bits

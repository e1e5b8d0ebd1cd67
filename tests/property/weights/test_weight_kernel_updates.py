"""Whole updates whose trainers and receivers use the kernels of GPUs, which a processor runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_fixture import open_fixture, run

torch = pytest.importorskip("torch", reason="THE KERNELS OF WEIGHTS WERE NOT RUN: torch is not installed")
from weight_processor import OnProcessor, kernels_on_processor  # noqa: E402

from asyncfabric.weights import Mesh, Move, Plan, Shard, alone, fused, place, plan_weights  # noqa: E402
from asyncfabric.weights.receiver import replica  # noqa: E402
from asyncfabric.weights.sender import exchange, shards  # noqa: E402

pytestmark = pytest.mark.slow
ROWS = 768


def mixed_plan(trainers: int) -> Plan:
    """Fused, turned, cut in columns, cast: for two receivers, of trainers that hold as many rows each."""
    shape = (ROWS, 512)
    trainer, ranks = Mesh.of({"fsdp": trainers}), Mesh.of({"tp": 2})
    held = place(shape, trainer, {"fsdp": Shard(0)})
    split = [place(shape, ranks, {"tp": Shard(dim)}) for dim in (0, 1)]
    moves = [
        Move(name, "bfloat16", held, "gate_up", "float8_e4m3fn", target, 128)
        for name, target in zip(("gate", "up"), fused([split[0]] * 2), strict=True)
    ]
    for number, target in enumerate((alone(split[1]), alone(split[0], (1, 0)))):
        for dtype, to, block in (
            ("bfloat16", "float8_e4m3fn", 128),
            ("float32", "bfloat16", 0),
            ("bfloat16", "bfloat16", 0),
        ):
            name = f"{dtype}_{to}_{number}"
            moves.append(Move(name, dtype, held, name, to, target, block))
    return plan_weights(moves, trainers=trainers, receivers=2, replicas=["a", "b"], chunk_bytes=1 << 15)


@pytest.mark.parametrize(("trainers", "measured"), [(2, False), (4, True)])
def test_updates_by_kernels_equal_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainers: int, measured: bool
) -> None:
    """Blocks that no shard and no piece cuts are never measured; others are, and go by the same units."""
    device = OnProcessor(kernels_on_processor(tmp_path))
    for module in (shards, replica):
        monkeypatch.setattr(module, "device_of", lambda name: device)
    looked: list[Any] = []
    look = exchange.Exchange._measured
    monkeypatch.setattr(exchange.Exchange, "_measured", lambda self, keys: (looked.extend(keys), look(self, keys))[1])

    def shard(rank: int, name: str) -> Any:
        values = np.random.default_rng([rank, len(name)]).standard_normal((ROWS // trainers, 512), np.float32)
        return values if name.startswith("float32") else (values.view(np.uint32) >> 16).astype("<u2")

    def tensors(rank: int, held: dict[str, Any]) -> dict[str, Any]:
        found = {
            name: torch.from_numpy(each.view(np.int16) if each.itemsize == 2 else each) for name, each in held.items()
        }
        return {name: each.view(torch.bfloat16) if each.itemsize == 2 else each for name, each in found.items()}

    async def body() -> None:
        async with open_fixture(mixed_plan(trainers), shard, tmp_path / "log", given=tensors) as fixture:
            for version in (1, 2):
                await fixture.bring(version)
                fixture.change(version)

    run(body)
    assert bool(looked) == measured
    assert {"whole_bfloat16", "lay_float32_bfloat16", "lay_16", "sums"} <= set(device.launched)

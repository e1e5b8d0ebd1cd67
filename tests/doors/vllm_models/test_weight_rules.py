"""Rules bring a trainer's parameters into vLLM's own model classes as their `load_weights` does, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, HEADS, KV_HEADS
from safetensors import safe_open

from asyncfabric.integrations.vllm_weight_rules import weight_rules
from asyncfabric.weights import (
    Held,
    LocalTensor,
    Mesh,
    ReplicaMemory,
    Shard,
    execute,
    moves_by_rules,
    place,
    plan_weights,
)
from asyncfabric.weights.tensors import dtype_of, stored

TRAINERS = 3
ONE_RANK = {"GptOssForCausalLM"}


@pytest.fixture(scope="module", params=[1, 2])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return the folder that vLLM's ranks wrote what they loaded to, and how many there were."""
    ranks, folder = int(request.param), tmp_path_factory.mktemp("loaded")
    program = [sys.executable, str(Path(__file__).with_name("loaded.py")), str(folder)]
    families = [name for name in FAMILIES if ranks == 1 or name not in ONE_RANK]
    running = [
        subprocess.Popen(
            [*program, str(rank), str(ranks), *families], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    try:
        for one in running:
            stated, _ = one.communicate(timeout=240)
            assert one.returncode == 0, stated[-3000:]
    finally:
        for one in running:
            one.kill()
            one.wait()
    return folder, ranks


def tensors_in(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict


@pytest.mark.parametrize("family", list(FAMILIES))
def test_rules_state_what_load_weights_does(loaded: tuple[Path, int], family: str) -> None:
    folder, ranks = loaded
    if ranks > 1 and family in ONE_RANK:
        with pytest.raises(ValueError, match="the rules of GPT-OSS are for one rank, the engine has 2"):
            weight_rules(["model.layers.0.attn.qkv_proj.weight"], heads=HEADS, kv_heads=KV_HEADS, ranks=ranks)
        return
    state = tensors_in(folder / f"{family}.safetensors")
    engine = [tensors_in(folder / f"{family}-{rank}.safetensors") for rank in range(ranks)]
    mesh = Mesh.of({"fsdp": TRAINERS})
    held = {
        name: Held(dtype_of(each), place(tuple(each.shape), mesh, {"fsdp": Shard(0)})) for name, each in state.items()
    }
    rooms = [{name: LocalTensor(dtype_of(each), tuple(each.shape)) for name, each in one.items()} for one in engine]
    kv_heads = HEADS if family.startswith("Deepseek") else KV_HEADS
    moves = moves_by_rules(held, rooms, weight_rules(rooms[0], heads=HEADS, kv_heads=kv_heads, ranks=ranks))
    plan = plan_weights(moves, trainers=TRAINERS, receivers=ranks, replicas=("one",))
    memory = ReplicaMemory(plan)
    execute(plan, lambda rank, name: stored(state[name])[held[name].placement.box_of(rank)], memory)
    extents = {
        (int(rank), move.region): tuple(int(side) for side in shape)
        for move in moves
        for rank, shape in zip(move.target.placement.ranks, move.target.local_shapes, strict=True)
    }
    wrong = []
    for (rank, name), shape in extents.items():
        wanted = stored(engine[rank][name])[tuple(slice(side) for side in shape)]
        got = memory.tensors["one", rank, name].view(wanted.dtype).reshape(shape)
        if not np.array_equal(got, wanted):
            wrong.append((rank, name))
    assert wrong == []
    assert {name for _, name in extents} == {name for one in engine for name in one}

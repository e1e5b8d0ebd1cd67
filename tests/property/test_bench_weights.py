"""Ring 2: what trainers of `bench weights` hold, put together, is the model that both references are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.weights import ReplicaMemory, execute
from asyncfabric_services.bench.weights.workload import FORMS, mixed_rows, plan_of, rows_at, rows_of


@given(
    trainers=st.integers(1, 12),
    side=st.integers(1, 200),
    number=st.integers(0, 5),
    form=st.sampled_from(sorted(FORMS)),
)
def test_shards_put_together_are_the_model(trainers: int, side: int, number: int, form: str) -> None:
    whole = rows_of(number, side, 0, side, 7, form)
    shards = [rows_of(number, side, *rows_at(rank, trainers, side), 7, form) for rank in range(trainers)]
    assert np.array_equal(np.concatenate(shards), whole)
    assert len(np.unique(whole)) > side // 4 or side < 8, "weights differ from each other"


@settings(deadline=None, max_examples=40)
@given(
    trainers=st.integers(1, 3),
    receivers=st.integers(1, 3),
    blocks=st.integers(1, 2),
    odd=st.integers(0, 60),
    form=st.sampled_from(sorted(FORMS)),
    harm=st.integers(0, 1 << 30),
)
def test_torch_makes_of_whole_matrices_what_the_reference_writes(
    trainers: int, receivers: int, blocks: int, odd: int, form: str, harm: int
) -> None:
    """And it sees one byte that is wrong, a tensor that is missing and one too many."""
    torch = pytest.importorskip("torch")
    from asyncfabric_services.bench.weights.gpu_reference import wrong_tensor

    side = 128 * receivers * blocks + (odd if FORMS[form][2] == 0 or receivers == 1 else 0)
    model: dict[str, Any] = {"trainers": trainers, "receivers": receivers, "replicas": 1, "matrices": 2, "side": side}
    model["form"] = form
    plan = plan_of(**model)

    def made(number: int, begin: int, end: int) -> Any:
        rows = mixed_rows(lambda first, last: np.arange(first, last, dtype=np.int64), number, side, begin, end, 3, form)
        return rows.astype(np.uint32 if FORMS[form][0] == "float32" else np.uint16).reshape(-1, side)

    def shard(rank: int, name: str) -> Any:
        bits = made(int(name.split()[1]), *rows_at(rank, trainers, side))
        return bits.view(np.float32) if FORMS[form][0] == "float32" else bits

    def whole(number: int) -> Any:
        bits = made(number, 0, side)
        signed = torch.from_numpy(bits.view(np.int32 if bits.itemsize == 4 else np.int16))
        return signed.view(getattr(torch, FORMS[form][0]))

    memory = ReplicaMemory(plan)
    execute(plan, shard, memory)
    for receiver in range(receivers):
        served = {
            name: torch.from_numpy(tensor.reshape(-1).view(np.uint8))
            for (_, one, name), tensor in memory.tensors.items()
            if one == receiver
        }
        assert wrong_tensor(served, receiver, model, whole) == ""
        names = sorted(served)
        victim = names[harm % len(names)]
        served[victim][harm % served[victim].numel()] ^= 1 << harm % 7
        assert wrong_tensor(served, receiver, model, whole) == victim
        left = {name: served[name] for name in names if name != victim}
        assert wrong_tensor(left, receiver, model, whole) == victim
        served[victim][harm % served[victim].numel()] ^= 1 << harm % 7
        assert wrong_tensor(served | {"another": served[victim]}, receiver, model, whole) == "another"

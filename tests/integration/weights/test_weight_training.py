"""Real training in real processes; each step goes over a fabric into replicas, equal to the bit to loaded ones.

ASYNCFABRIC_TEST_VERSIONS: how many versions, and from 20 on for each placement of trainers and of replicas.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

torch = pytest.importorskip("torch", reason="NO TRAINING: torch is not installed")
pytest.importorskip("transformers", reason="NO TRAINING: transformers is not installed")

from processes import Process  # noqa: E402
from trained import Filled, Version  # noqa: E402

from asyncfabric.weights import ReplicaLayout  # noqa: E402
from asyncfabric.weights.plan.holdings import Holding  # noqa: E402

VERSIONS = int(os.environ.get("ASYNCFABRIC_TEST_VERSIONS", "2"))
FULL = VERSIONS >= 20
DENSE = [(ranks, ranks, fp8) for fp8 in (False, True) for ranks in (1, 2, 4)]
DEALT = [(ranks, tp, fp8) for fp8 in (False, True) for ranks, tp in ((1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (4, 4))]
PLACEMENTS: list[Any] = [
    ("llama", "fsdp", 2, 1, "float32", DENSE if FULL else [(2, 2, True)]),
    ("llama", "fsdp", 4, 1, "float32", DENSE),
    ("llama", "fsdp", 2, 1, "bfloat16", DENSE),
    ("llama", "tp", 4, 2, "float32", DENSE),
    ("qwen", "ep", 2, 1, "float32", DEALT),
    ("qwen", "ep", 4, 1, "float32", DEALT),
    ("qwen", "fsdp", 4, 1, "bfloat16", DEALT),
]

CHOSEN = PLACEMENTS if FULL else PLACEMENTS[:1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200 + 60 * VERSIONS)]


def versions_in(folder: Path, ranks: int) -> Iterator[Version]:
    """Read what the ranks kept: their shards, and the whole state."""
    for version in range(1, VERSIONS + 1):
        arrays = [dict(np.load(folder / f"{version}-{rank}.npz")) for rank in range(ranks)]
        yield arrays, torch.load(folder / f"{version}.pt", weights_only=True)


@pytest.mark.parametrize("placement", CHOSEN, ids=lambda one: "-".join(map(str, one[:5])))
def test_each_version_of_a_training_equals_the_loaded_one(tmp_path: Path, placement: Any) -> None:
    kind, how, ranks, tp, dtype, layouts = placement
    with ExitStack() as stack:
        arguments = [str(tmp_path), "", str(ranks), str(tp), kind, how, dtype]
        trainers = []
        for rank in range(ranks):
            arguments[1] = str(rank)
            trainers.append(stack.enter_context(Process("trainer_rank.py", *arguments)))
        for version in range(1, VERSIONS + 1):
            for trainer in trainers:
                trainer.send(do="step")
            for trainer in trainers:
                assert trainer.receive(120)["step"] == version
        for trainer in trainers:
            trainer.close()
    reported = [
        msgspec.msgpack.decode((tmp_path / f"held-{rank}").read_bytes(), type=list[Holding]) for rank in range(ranks)
    ]
    for number, (parts, seats, fp8) in enumerate(layouts):
        filled = Filled(kind, reported, ReplicaLayout(ranks=parts, tp=seats, fp8=fp8))
        seen = trio.run(filled.over_fabric, versions_in(tmp_path, ranks), tmp_path / f"log-{number}")
        assert len(seen) == VERSIONS
        assert all(not torch.equal(*pair) for pair in itertools.pairwise(seen)), "training changes answers"
        arrays, whole = list(versions_in(tmp_path, ranks))[-1]
        assert torch.equal(filled.check(arrays, whole), seen[-1]), "the reference gives the same"
    print(f"{kind} {how} {ranks} {dtype}: {VERSIONS} versions, {len(layouts)} layouts: equal")

"""Weights in three calls: real ranks of FSDP2 and of an engine meet over a TCPStore; versions are right to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="WEIGHTS IN THREE CALLS WERE NOT RUN: torch is not installed")
pytest.importorskip("transformers", reason="WEIGHTS IN THREE CALLS WERE NOT RUN: transformers is not installed")

from processes import Process  # noqa: E402  # needs nothing of the above
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.slow
HEADS, KV_HEADS, VOCAB = 4, 2, 100


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start a member of the meeting; the first serves the store; all end with the test."""
    with ExitStack() as stack:
        port: list[int] = []

        def started(role: str, rank: int, ranks: int, name: str = "engine") -> Process:
            arguments = (role, str(rank), str(ranks), str(port[0] if port else 0), str(tmp_path), name)
            one = stack.enter_context(Process("weights_member.py", *arguments))
            if not port:
                port.append(one.receive()["port"])
            return one

        yield started


def check(folder: Path, version: int, name: str, ranks: int) -> None:
    """Compare an engine's tensors with what a loader makes of the version's whole tensors."""
    state = load_file(folder / f"version-{version}.safetensors")
    for rank in range(ranks):
        tensors = load_file(folder / f"{name}-{rank}-{version}.safetensors")

        def rows(each: str, rank: int = rank) -> Any:
            return state[each].chunk(ranks)[rank]

        for each, got in tensors.items():
            root = each.rpartition(".")[0].rpartition(".")[0]
            if "qkv_proj" in each:
                wanted = torch.cat([rows(f"{root}.{one}_proj.weight") for one in "qkv"])
            elif "gate_up_proj" in each:
                wanted = torch.cat([rows(f"{root}.{one}_proj.weight") for one in ("gate", "up")])
            elif "o_proj" in each or "down_proj" in each:
                wanted = state[each].chunk(ranks, dim=1)[rank]
            elif "embed" in each or "lm_head" in each:
                room = len(got)
                wanted = state[each][rank * room : (rank + 1) * room]
                assert (got[len(wanted) :] == -1).all(), "rows behind the vocabulary were written"
                got = got[: len(wanted)]
            else:
                wanted = state[each]
            assert torch.equal(got, wanted), (version, rank, each)


def test_versions_reach_the_tensors_of_engines_that_come_and_go(start: Callable[..., Process], tmp_path: Path) -> None:
    trainers = [start("trainer", rank, 2) for rank in range(2)]
    engine = [start("engine", rank, 2) for rank in range(2)]
    for one in (*trainers, *engine):
        one.receive()

    def publish(version: int, **more: Any) -> None:
        for one in trainers:
            one.send(do="publish", version=version, **more)
        for one in trainers:
            assert one.receive() == {"published": version}

    def apply(version: int, ranks: list[Process], name: str) -> None:
        for one in ranks:
            one.send(do="apply", version=version)
        for one in ranks:
            assert one.receive() == {"applied": version, "moved": []}
        check(tmp_path, version, name, 2)

    publish(1)
    apply(1, engine, "engine")
    publish(2, wait=False)
    apply(2, engine, "engine")

    assert "model.norm.weight" in start("engine", 0, 1, "odd").receive()["refused"]

    late = [start("engine", rank, 2, "late") for rank in range(2)]
    for one in late:
        one.receive()
    apply(2, late, "late")  # from an engine that has it, with no publish in between
    engine[0].child.kill()  # the others go on without it
    publish(3)
    apply(3, late, "late")
    trainers[0].child.kill()  # it serves the store
    for one in late:
        one.send(do="apply", version=4)
    for one in late:
        assert "receives no more versions" in one.receive()["error"]
        one.send(do="apply", version=3)
        assert one.receive() == {"applied": 3, "moved": []}
        one.send(do="end")
        assert "left" in one.receive()


def test_parameters_that_do_not_fit_are_reported_at_both_ends(start: Callable[..., Process]) -> None:
    ends = [start("trainer", 0, 1), start("engine", 0, 1, "odd")]
    for one in ends:
        assert "model.norm.weight" in one.receive()["refused"]

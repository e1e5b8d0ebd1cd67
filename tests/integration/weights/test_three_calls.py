"""Weights in three calls: real ranks of FSDP2 and of an engine meet over a TCPStore; versions are right to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="WEIGHTS IN THREE CALLS WERE NOT RUN: torch is not installed")
pytest.importorskip("transformers", reason="WEIGHTS IN THREE CALLS WERE NOT RUN: transformers is not installed")

from processes import PATIENCE, Process  # noqa: E402  # needs nothing of the above
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.slow
HEADS, KV_HEADS, VOCAB = 4, 2, 100


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start a member of the meeting; the first serves the store; all end with the test."""
    with ExitStack() as stack:
        port: list[int] = []

        def started(role: str, rank: int, ranks: int, name: str = "", shadow: str = "host") -> Process:
            name = name or {"trainer": "weights"}.get(role, "engine")
            arguments = (role, str(rank), str(ranks), str(port[0] if port else 0), str(tmp_path), name, shadow)
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


def until_it_comes(one: Process, version: int) -> dict[str, Any]:
    """Return what an engine has when a version waits for it."""
    deadline = time.monotonic() + PATIENCE
    while (look := one.ask("look"))["coming"] != version:
        assert time.monotonic() < deadline, look
        time.sleep(0.02)
    return look


def publish(trainers: list[Process], version: int) -> None:
    for one in trainers:
        one.send(do="publish", version=version)


def answers(ones: list[Process]) -> list[dict[str, Any]]:
    return [one.receive() for one in ones]


def test_a_version_comes_in_place_while_an_engine_is_paused_or_it_knows(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """A rank of the training is killed in the midst of an update, then rank 0 of the next training; a third repairs."""
    engine = [start("engine", rank, 2, shadow="none") for rank in range(2)]
    version = 0
    for at in ("_post", "_send_report", ""):
        meeting = f"weights{version or ''}"
        world = 1 if version else 2
        trainers = [start("trainer", rank, world, meeting) for rank in range(world)]
        for one in engine if version else ():
            one.send(do="meet", meeting=meeting)
        assert all("ready" in answer for answer in answers([*trainers, *engine]))
        for _ in range(world):
            version += 1
            before = [one.ask("look") for one in engine]
            publish(trainers, version)
            assert [(until_it_comes(one, version)["digest"]) for one in engine] == [one["digest"] for one in before]
            for one in engine:
                one.send(do="apply", version=version)
            assert answers(engine) == [{"applied": version, "moved": []}] * 2
            assert answers(trainers) == [{"published": version}] * world
            check(tmp_path, version, "engine", 2)
        if not at:
            return
        version += 1
        trainers[-1].send(do="die", at=at)
        publish(trainers, version)
        before = [until_it_comes(one, version) for one in engine]
        for one in engine:
            one.send(do="apply", version=version)
        for one, look in zip(engine, before, strict=True):
            failed = one.receive()
            assert "hold parts of several versions now" in failed["error"] and failed["version"] == 0
            after = one.ask("look")
            assert after["version"] == after["coming"] == 0 and after["digest"] != look["digest"], "nothing was written"
        for one in trainers:
            one.child.kill()


def test_engines_in_place_and_with_a_shadow_go_on_without_one_that_is_killed(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    trainers = [start("trainer", rank, 2) for rank in range(2)]
    shadows = {"shadowed": "host", "one": "none", "two": "none"}
    engines = {name: start("engine", 0, 1, name, shadow) for name, shadow in shadows.items()}
    assert all("ready" in answer for answer in answers([*trainers, *engines.values()]))
    for version in (1, 2, 3, 4):
        if version == 3:
            engines["two"].send(do="die")
        publish(trainers, version)
        for one in engines.values():
            one.send(do="apply", version=version)
        if version == 3:
            engines.pop("two").child.wait(PATIENCE)
        assert answers(list(engines.values())) == [{"applied": version, "moved": []}] * len(engines)
        assert answers(trainers) == [{"published": version}] * 2
        for name in engines:
            check(tmp_path, version, name, 1)
    late = start("engine", 0, 1, "late", "none")
    assert "ready" in late.receive()
    late.send(do="apply", version=4)  # out of the tensors of the other one in place
    assert late.receive() == {"applied": 4, "moved": []}
    check(tmp_path, 4, "late", 1)

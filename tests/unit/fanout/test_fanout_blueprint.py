"""The coordinator's copy of the blueprint: comes in parts, stays on the disk, is never mixed up with another one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

pytest.importorskip("starlette", reason="services need starlette")

from asyncfabric.weights import LocalTensor, ReplicaLayout
from asyncfabric_services.fanout.blueprint import BlueprintPart, BlueprintStore, FanoutBlueprint


def blueprint(config: str = "{}") -> FanoutBlueprint:
    tensors = [{"w": LocalTensor("bfloat16", (2, 3))}, {"w": LocalTensor("bfloat16", (2, 3))}]
    return FanoutBlueprint(b"plan", config, ReplicaLayout(ranks=2, tp=2), tensors)


def parts(made: FanoutBlueprint, size: int = 16) -> list[BlueprintPart]:
    data = msgspec.msgpack.encode(made)
    return [BlueprintPart(at, len(data), data[at : at + size]) for at in range(0, len(data), size)]


def test_a_blueprint_comes_in_parts_and_is_kept(tmp_path: Path) -> None:
    store, path = BlueprintStore(tmp_path / "x"), tmp_path / "x"
    reported = parts(blueprint())
    assert [store.take(part) for part in reported] == [False] * (len(reported) - 1) + [True]
    assert trio.run(store.blueprint) == blueprint()
    again = BlueprintStore(path)
    assert trio.run(again.blueprint) == blueprint(), "a coordinator that was restarted has it"
    assert trio.run(again.part, 5) == path.read_bytes()[5:]
    assert [again.take(part) for part in reported][-1], "the same one is welcome"


def test_another_one_is_refused(tmp_path: Path) -> None:
    store = BlueprintStore(tmp_path / "x")
    for part in parts(blueprint()):
        store.take(part)
    *most, last = parts(blueprint('{"a": 1}'))
    for part in most:
        store.take(part)
    with pytest.raises(ValueError, match="another model or another layout"):
        store.take(last)
    assert trio.run(store.blueprint) == blueprint()


def test_parts_of_two_tellers_are_not_mixed(tmp_path: Path) -> None:
    store = BlueprintStore(tmp_path / "x")
    first, second, *_ = parts(blueprint())
    store.take(first)
    store.take(first)  # somebody else begins
    store.take(second)
    with pytest.raises(ValueError, match="does not follow 32 bytes"):
        store.take(second)

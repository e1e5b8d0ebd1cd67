"""Engines that differ in one session, as real processes: each gets whole versions, whatever the others do."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="ENGINES THAT DIFFER WERE NOT RUN: torch is not installed")

from processes import Process  # noqa: E402  # needs nothing of the above
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.slow
LOST_S = 5.0  # of a StoreJoin: who stands still for so long is lost


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start a member of the meeting; the first serves the store; all end with the test."""
    with ExitStack() as stack:
        port: list[int] = []

        def started(role: str, first: object, second: object) -> Process:
            arguments = (role, str(first), str(second), str(port[0] if port else 0), str(tmp_path))
            one = stack.enter_context(Process("weights_engines_member.py", *arguments))
            if not port:
                port.append(one.receive()["port"])
            return one

        yield started


def quantised(weight: Any) -> tuple[Any, Any]:
    """Quantise in blocks of 128 x 128 as DeepSeek-V3 does."""
    blocks = weight.reshape(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    bits = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return bits.reshape(weight.shape), scales


def check(folder: Path, layout: str, name: str, version: int) -> None:
    """Compare an engine's tensors with what a loader makes of the version's whole tensors."""
    state = load_file(folder / f"version-{version}.safetensors")
    ranks = {"two": 2, "four": 4, "eight-bit": 1}[layout]
    for rank in range(ranks):
        got = load_file(folder / f"{name}-{rank}.safetensors")
        wanted = {
            "gate_up": torch.cat([state[each].chunk(ranks)[rank] for each in ("gate", "up")]).bfloat16(),
            "down": state["down"].chunk(ranks, dim=1)[rank].bfloat16(),
            "norm": state["norm"].bfloat16(),
        }
        if layout == "eight-bit":
            wanted["down"], wanted["down_scale_inv"] = quantised(state["down"])
        assert got.keys() == wanted.keys()
        for each, tensor in wanted.items():
            same = torch.equal(got[each].view(torch.uint8), tensor.contiguous().view(torch.uint8))
            assert same, (version, name, rank, each)


@pytest.mark.timeout(400)
def test_each_engine_gets_whole_versions_whatever_the_others_do(start: Callable[..., Process], tmp_path: Path) -> None:
    trainers = [start("trainer", rank, 2) for rank in range(2)]
    engines = {name: start("engine", name, name) for name in ("two", "four")}
    for one in (*trainers, *engines.values()):
        assert "ready" in one.receive(120)
    version = 0

    def published() -> set[str]:
        """Publish a version and return the engines that it comes to."""
        nonlocal version
        version += 1
        for one in trainers:
            one.send(version=version)
        reports = [one.receive() for one in trainers]
        return {each.partition("/")[0] for report in reports for each in report["receivers"]}

    def publish(*names: str) -> None:
        """Publish a version that comes to these engines and to no other."""
        assert published() == set(names), version

    def apply(*names: str) -> None:
        for name in names:
            engines[name].send(version=version)
        for name in names:
            assert set(engines[name].receive()["applied"]) == {version}
            check(tmp_path, name.removesuffix("-late"), name, version)

    publish("two", "four")
    apply("two", "four")

    refused = {
        "wrong-shape": "norm",  # has other rows than the trainer
        "wrong-dtype": "norm",
        "wrong-rule": "no rule states where the engine wants it",
    }
    engines["eight-bit"] = start("engine", "eight-bit", "eight-bit")
    wrong = {layout: start("engine", layout, layout) for layout in refused}
    for layout, text in refused.items():
        assert text in wrong[layout].receive(120)["refused"]
    assert engines["eight-bit"].receive(120) == {"ready": "eight-bit"}
    publish("two", "four", "eight-bit")
    apply("two", "four", "eight-bit")

    engines["two-late"] = start("engine", "two", "two-late")
    assert engines["two-late"].receive(120) == {"ready": "two-late"}
    apply("two-late")  # from the one that is laid out alike

    engines["four"].send_signal(signal.SIGSTOP)
    until_s = time.monotonic() + 2 * LOST_S
    while time.monotonic() < until_s:
        publish("two", "two-late", "eight-bit")
        apply("two", "two-late", "eight-bit")
    engines["four"].send_signal(signal.SIGCONT)

    everybody = ("two", "two-late", "eight-bit", "four")
    until_s = time.monotonic() + 60
    while "four" not in published():  # it has to find its way back first
        assert time.monotonic() < until_s
        apply("two", "two-late", "eight-bit")
    apply(*everybody)

    publish(*everybody)
    apply("two", "two-late", "eight-bit")  # "four" has it, and reaches no step boundary
    publish("two", "two-late", "eight-bit")
    began_s = time.monotonic()
    apply("two", "two-late", "eight-bit")
    publish("two", "two-late", "eight-bit")
    engines["four"].send(version=1)  # writes what it has, which is the version before those two
    engines["four"].receive()
    check(tmp_path, "four", "four", version - 3)
    assert time.monotonic() - began_s < 60
    engines["four"].child.kill()
    apply("two", "two-late", "eight-bit")
    publish("two", "two-late", "eight-bit")
    apply("two", "two-late", "eight-bit")

"""A training and an engine that know a directory's address alone: its process, theirs, and trainings that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="MEETINGS BY A DIRECTORY WERE NOT RUN: torch is not installed")

from processes import Process  # noqa: E402  # needs nothing of the above
from safetensors.torch import load_file  # noqa: E402

from asyncfabric.control.address import LinkAddress  # noqa: E402
from asyncfabric.weights.sessions import DirectoryJoin, open_receiver  # noqa: E402
from asyncfabric.weights.sessions.directory import host_towards  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(
            Process("weights_by_directory.py", *map(str, arguments), str(tmp_path))
        )


def test_a_directory_s_address_is_enough(start: Callable[..., Process], tmp_path: Path) -> None:
    place = f"ipc://{tmp_path}/directory.sock"
    engine = start("engine", place)  # comes first, before the directory
    directory = start("directory", place)
    address = directory.receive()["address"]
    assert address == place
    for seed in (1, 2):  # a training, and one after it, which the engine's next life finds
        training = start("trainer", place, seed)
        engine.receive()
        training.receive()
        for version in (1, 2):
            training.send(version=version)
            assert training.receive() == {"published": version, "receivers": ["engine/0"]}
            assert engine.receive() == {"applied": version}
            got, wanted = (load_file(tmp_path / f"{name}-{version}.safetensors") for name in ("engine", "trainer"))
            assert torch.equal(got["w"], wanted["w"])
        training.send(end=True)
        training.receive()
        assert "ended" in engine.receive(60)
        if seed == 1:
            engine = start("engine", place)
            # no training is there: the engine waits for one


@pytest.mark.trio
async def test_what_is_no_meeting_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="expected ipc:///path/to/socket"):
        DirectoryJoin("localhost:8000")
    with pytest.raises(TypeError, match="join must be a Join, a store, or a directory's address, got int"):
        async with open_receiver({"w": torch.zeros(4)}, 7):  # type: ignore[arg-type]
            pass
    with pytest.raises(ValueError, match="must"):
        DirectoryJoin("ipc:///tmp/x.sock", "a name")


def test_the_host_is_the_one_that_leads_to_the_directory() -> None:
    assert host_towards(LinkAddress.parse("ipc:///tmp/x.sock")) == "127.0.0.1"
    assert host_towards(LinkAddress.parse("tcp://127.0.0.1:4711#insecure")) == "127.0.0.1"

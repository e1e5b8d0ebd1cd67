"""The one fabric of a process: opened by its first use, chosen by a call or the environment, anew in a fork's child."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import asyncfabric as af
from asyncfabric.integrations import process_fabric as room


@pytest.fixture(autouse=True)
def none_before_and_after() -> Iterator[None]:
    room.close_process_fabric()
    room.configure(None)
    yield
    room.close_process_fabric()
    room.configure(None)


def test_the_environment_chooses_rails_unless_the_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(room.RAILS_VARIABLE, raising=False)
    assert room.config_in_force().rails == af.FabricConfig().rails
    monkeypatch.setenv(room.RAILS_VARIABLE, " local , tcp:lo,")
    assert room.config_in_force().rails == ("local", "tcp:lo")
    room.configure(af.FabricConfig(rails=("local",)))
    assert room.config_in_force().rails == ("local",)
    with pytest.raises(TypeError, match="takes a FabricConfig or None, got str"):
        room.configure("local")  # type: ignore[arg-type]  # on purpose


def test_all_share_one_fabric_and_a_rail_that_is_not_there_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(room.RAILS_VARIABLE, "local")
    fabric = room.process_fabric()
    assert room.process_fabric() is fabric
    with pytest.raises(RuntimeError, match="before the first transfer"):
        room.configure(None)
    room.close_process_fabric()
    assert fabric.closed
    monkeypatch.setenv(room.RAILS_VARIABLE, "verbs:no_such_device")
    with pytest.raises(af.DeviceError) as caught:
        room.process_fabric()
    assert any(room.RAILS_VARIABLE in note for note in caught.value.__notes__)


def test_a_forked_child_opens_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(room.RAILS_VARIABLE, "local")
    parents = room.process_fabric()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fabric = room.process_fabric()
            if fabric is not parents and fabric.allocate(4096).length == 4096:
                status = 0
            room.close_process_fabric()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not parents.closed

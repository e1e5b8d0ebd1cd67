"""Units of boxes: how large they are by the cores of the process. Needs no build of the engine."""

import os
from types import SimpleNamespace

import pytest

from asyncfabric.weights.update.host_device import HOST_UNIT_BYTES, LEAST_UNIT_BYTES, HostDevice
from asyncfabric.weights.update.program import Program


@pytest.mark.parametrize(("cores", "unit_bytes"), [(1, HOST_UNIT_BYTES), (2, HOST_UNIT_BYTES), (16, 32 << 20)])
def test_few_cores_take_large_units(monkeypatch: pytest.MonkeyPatch, cores: int, unit_bytes: int) -> None:
    """Every unit costs the event loops, which few cores notice."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert HostDevice().unit_bytes == unit_bytes


def test_units_of_all_threads_together_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many threads fill smaller units side by side, and what is in hand at once does not grow with them."""
    for cores in (2, 8, 16, 32, 256):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        device = HostDevice()
        assert device.unit_bytes >= LEAST_UNIT_BYTES
        assert device.fills * device.unit_bytes <= HOST_UNIT_BYTES


def test_first_units_are_small_where_that_is_asked_for() -> None:
    """Each may have twice of the one before, up to the most; one box alone may have more."""
    program = Program.__new__(Program)
    program.boxes = [SimpleNamespace(weight_bytes=size, scale_bytes=0, staged_bytes=size) for size in [10] * 20 + [90]]  # type: ignore[misc]
    program._units = {}
    assert [len(unit.boxes) for unit in program.units(80, 10)] == [1, 2, 4, 8, 5, 1]
    assert [len(unit.boxes) for unit in program.units(80)] == [8, 8, 4, 1]
    assert [len(unit.boxes) for unit in program.units(80, 1000)] == [8, 8, 4, 1]

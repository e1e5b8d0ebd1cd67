"""Units of boxes: how large they are by the cores of the process. Needs no build of the engine."""

import os

import pytest

from asyncfabric.weights.update.device import HOST_UNIT_BYTES, LEAST_UNIT_BYTES, HostDevice


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

"""Units of boxes: how large they are by the cores of the process. Needs no build of the engine."""

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric.weights import threads
from asyncfabric.weights.memory.host import HOST_UNIT_BYTES, LEAST_UNIT_BYTES, HostDevice
from asyncfabric.weights.sender.program import Program


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


def test_receivers_with_cores_check_several_batches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, checks in ((1, 1), (2, 1), (15, 1), (16, 4), (256, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert HostDevice().checks == checks
        assert checks <= threads.threads()


def program_of(sizes: list[int]) -> Program:
    """Return boxes of so many bytes."""
    program = Program.__new__(Program)
    program.boxes = [SimpleNamespace(written_bytes=size, staged_bytes=size) for size in sizes]  # type: ignore[misc]
    program._units = {}
    return program


def test_first_units_are_small_where_that_is_asked_for() -> None:
    """Each may have twice of the one before, up to the most; one box alone may have more."""
    program = program_of([10] * 20 + [90])
    assert [len(unit.boxes) for unit in program.units(80, 10)] == [1, 2, 4, 8, 5, 1]
    assert [len(unit.boxes) for unit in program.units(80)] == [8, 8, 4, 1]
    assert [len(unit.boxes) for unit in program.units(80, 1000)] == [8, 8, 4, 1]


def test_last_units_are_small_where_that_is_asked_for() -> None:
    """Each has at most half of what is left, down to the least; all boxes are there, in order."""
    assert [len(unit.boxes) for unit in program_of([10] * 32).units(80, 10, 10)] == [1, 2, 4, 8, 8, 4, 2, 1, 1, 1]
    assert [len(unit.boxes) for unit in program_of([10] * 32).units(80, None, 30)] == [8, 8, 8, 4, 3, 1]
    assert [len(unit.boxes) for unit in program_of([90, 10, 90]).units(80, 10, 10)] == [1, 1, 1]
    assert [len(unit.boxes) for unit in program_of([10]).units(80, 10, 10)] == [1]
    assert program_of([]).units(80, 10, 10) == []


@given(
    sizes=st.lists(st.integers(1, 100), max_size=60),
    most=st.integers(1, 300),
    edges=st.tuples(st.none() | st.integers(1, 90), st.none() | st.integers(1, 90)),
)
def test_units_are_all_boxes_in_order_and_none_too_large(
    sizes: list[int], most: int, edges: tuple[int | None, int | None]
) -> None:
    program = program_of(sizes)
    units = program.units(most, *edges)
    assert [box for unit in units for box in unit.boxes] == program.boxes
    for unit in units:
        assert len(unit.boxes) == 1 or sum(box.written_bytes for box in unit.boxes) <= most
    if units and edges[1] is not None and len(units[-1].boxes) > 1:
        assert sum(box.written_bytes for box in units[-1].boxes) <= max(edges[1], sum(sizes) // 2)
    assert program.units(most, *edges) is units

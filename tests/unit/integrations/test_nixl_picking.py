"""Positions of prepared lists: the compiled pass picks the pages that the plan in numpy does, and takes no bad ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from nixl_agents import LENGTH, Agent

from asyncfabric.integrations.nixl._bindings import nixlInvalidParamError
from asyncfabric.integrations.nixl.kinds import OPERATIONS
from asyncfabric.integrations.nixl.plan import PageStep, Step, pick, plan
from asyncfabric.testing import FakeNetwork

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

PAGE = 256
COUNT = LENGTH // PAGE
FORMS = [list, *(lambda numbers, kind=kind: np.array(numbers, kind) for kind in ("i4", "u4", "i8", "u8"))]


@pytest.fixture
def pair() -> Iterator[tuple[Agent, Agent]]:
    network = FakeNetwork()
    a, b = Agent("a", network), Agent("b", network)
    a.meets(b)
    yield a, b
    a.close()
    b.close()


def lists_of(a: Agent, b: Agent, page: int = PAGE) -> tuple[Any, Any]:
    blocks = [(at, page) for at in range(0, LENGTH - page + 1, page)]
    return a.prep_xfer_dlist("", a.rows(*blocks), "DRAM"), a.prep_xfer_dlist("b", b.rows(*blocks), "DRAM")


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([7, 3, 200, 0], [1, 0, COUNT - 1, 9]),
        ([5], [6]),
        ([4, 5, 6], [10, 11, 12]),
        ([4, 5, 6], [10, 12, 11]),
        ([4, 6, 5], [10, 11, 12]),
        ([3, 3], [8, 8]),
        ([2, 1], [2, 1]),
    ],
)
def test_the_same_calls_as_of_the_plan(
    pair: tuple[Agent, Agent], operation: str, form: Any, first: list[int], second: list[int]
) -> None:
    local, remote = lists_of(*pair)
    chosen = [np.array(each, np.int64) for each in (first, second)]
    expected = plan(OPERATIONS[operation], local._side.pick(chosen[0]), remote._side.pick(chosen[1]))
    found = pick(OPERATIONS[operation], local._alike, remote._alike, form(first), form(second))
    assert found is not None
    assert len(found) == len(expected) == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs) and ours.writes is theirs.writes and ours.key is theirs.key
        if isinstance(ours, PageStep) and isinstance(theirs, PageStep):
            assert ours.region is theirs.region and ours.page_bytes == theirs.page_bytes == PAGE
            assert ours.local.tolist() == theirs.local.tolist() and ours.remote.tolist() == theirs.remote.tolist()
        else:
            assert isinstance(ours, Step) and isinstance(theirs, Step)
            assert ours.offset == theirs.offset and repr(ours.part) == repr(theirs.part)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [COUNT, 2**31 - 1])
def test_positions_outside_are_refused_on_both_sides(pair: tuple[Agent, Agent], form: Any, wrong: int) -> None:
    local, remote = lists_of(*pair)
    for first, second, side in (([0, wrong], [1, 2], "local"), ([1, 2], [wrong, 0], "remote")):
        with pytest.raises(nixlInvalidParamError, match=f"{side} position {wrong} is out of range"):
            pair[0].make_prepped_xfer("WRITE", local, form(first), remote, form(second))


@pytest.mark.parametrize("form", [list, *(lambda numbers, kind=kind: np.array(numbers, kind) for kind in ("i4", "i8"))])
def test_negative_positions_are_refused(pair: tuple[Agent, Agent], form: Any) -> None:
    local, remote = lists_of(*pair)
    with pytest.raises(nixlInvalidParamError, match="local position -1 is out of range"):
        pair[0].make_prepped_xfer("WRITE", local, form([0, -1]), remote, form([1, 2]))


@pytest.mark.parametrize(
    "odd",
    [[True, False], [0.0, 1.0], np.array([0.0, 1.0]), np.array([[0], [1]]), [2**70, 0], "01", 5],
    ids=["bools", "floats", "array of floats", "two dimensions", "huge", "text", "number"],
)
def test_what_is_no_flat_list_of_integers_is_refused(pair: tuple[Agent, Agent], odd: Any) -> None:
    local, remote = lists_of(*pair)
    with pytest.raises(nixlInvalidParamError):
        pair[0].make_prepped_xfer("WRITE", local, odd, remote, [0, 1])
    with pytest.raises(nixlInvalidParamError):
        pair[0].make_prepped_xfer("WRITE", local, [0, 1], remote, odd)


def test_as_many_positions_on_both_sides(pair: tuple[Agent, Agent]) -> None:
    local, remote = lists_of(*pair)
    for first, second in (([0], [1, 2]), ([0, 1], [1]), ([], []), ([], [1])):
        with pytest.raises(nixlInvalidParamError, match="equally many"):
            pair[0].make_prepped_xfer("WRITE", local, first, remote, second)


def test_lists_that_are_not_alike_go_by_the_plan(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    mixed = a.prep_xfer_dlist("", a.rows((0, 16), (64, 32), (128, 16)), "DRAM")
    remote = a.prep_xfer_dlist("b", b.rows((512, 16), (1024, 32), (256, 16)), "DRAM")
    assert mixed._alike is None
    a.ended(a.make_prepped_xfer("WRITE", mixed, [1, 2], remote, [1, 0]))
    assert np.array_equal(b.memory[1024:1056], a.memory[64:96]) and np.array_equal(b.memory[512:528], a.memory[128:144])
    with pytest.raises(nixlInvalidParamError, match="descriptor 0 has 256 bytes locally and 512 remotely"):
        a.make_prepped_xfer("WRITE", lists_of(a, b)[0], [3], lists_of(a, b, 512)[1], [3])


def test_positions_that_the_caller_changes_later_do_not_count(pair: tuple[Agent, Agent]) -> None:
    a, b = pair
    local, remote = lists_of(a, b)
    first, second = np.array([1, 5], np.int64), np.array([2, 9], np.int64)
    handle = a.make_prepped_xfer("WRITE", local, first, remote, second)
    before = b.memory.copy()
    first[:], second[:] = 0, 0
    a.ended(handle)
    for source, target in ((1, 2), (5, 9)):
        before[target * PAGE : (target + 1) * PAGE] = a.memory[source * PAGE : (source + 1) * PAGE]
    assert np.array_equal(b.memory, before)


def test_blocks_of_many_registrations_and_lengths_arrive_where_they_belong(pair: tuple[Agent, Agent]) -> None:
    dice, slots, width = np.random.default_rng(3), 40, 64
    sources = [dice.integers(0, 256, slots * width, np.uint8) for _ in range(3)]
    targets = [np.zeros(slots * width, np.uint8) for _ in range(4)]
    for agent, memories in zip(pair, (sources, targets), strict=True):
        rows = [(memory.ctypes.data, memory.nbytes, 0, "") for memory in memories]
        agent.register_memory(agent.get_reg_descs(rows, "DRAM"))
    a, b = pair
    a.meets(b)
    lengths = dice.choice([16, 48, 64], 60)
    begins = dice.permutation(len(sources) * slots)[:60], dice.permutation(len(targets) * slots)[:60]
    expected = [target.copy() for target in targets]
    lists = []
    for memories, chosen in zip((sources, targets), begins, strict=True):
        places = [(memories[one // slots].ctypes.data + one % slots * width) for one in chosen.tolist()]
        lists.append([(at, int(size), 0) for at, size in zip(places, lengths, strict=True)])
    for source, target, size in zip(*begins, lengths, strict=True):
        begin = source % slots * width
        moved = sources[source // slots][begin : begin + size]
        expected[target // slots][target % slots * width :][:size] = moved
    local, remote = a.prep_xfer_dlist("", lists[0], "DRAM"), a.prep_xfer_dlist("b", lists[1], "DRAM")
    order = np.arange(60)
    a.ended(a.make_prepped_xfer("WRITE", local, order, remote, order))
    assert all(np.array_equal(there, wanted) for there, wanted in zip(targets, expected, strict=True))

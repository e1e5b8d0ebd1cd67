"""Routing, passes, records and buffers for random shapes: each row goes once to where it belongs, nothing overlaps."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.errors import RemoteProtocolError
from asyncfabric.moe import MoeConfig, buffer_bytes
from asyncfabric.moe.host.buffers import LaneShape
from asyncfabric.moe.host.grouping import group_rows
from asyncfabric.moe.host.passes import PassPlan, circle
from asyncfabric.moe.host.record import Rows, read_record, record_bytes, step_of, write_record
from asyncfabric.moe.host.routing import owner_of_expert, owners, plan_route
from asyncfabric.moe.host.session import plan_lanes

Array = np.ndarray[Any, Any]


@st.composite
def choices(draw: Any) -> tuple[int, Array]:
    """Numbers of experts and random choices, -1 among them."""
    experts = draw(st.integers(1, 12))
    shape = (draw(st.integers(0, 20)), draw(st.integers(1, 10)))
    seed = draw(st.integers(0, 1 << 20))
    return experts, np.random.default_rng(seed).integers(-1, experts, size=shape).astype(np.int32)


@given(choices(), st.integers(1, 9), st.booleans())
def test_each_token_goes_once_to_each_member_that_has_an_expert_of_it(
    drawn: tuple[int, Array], members: int, hole: bool
) -> None:
    experts, indices = drawn
    bounds = np.linspace(0, experts, members + 1).astype(int)
    ranges = [range(low, high) for low, high in pairwise(bounds)]
    if hole:
        ranges[-1] = range(0)  # an excluded rank: its experts cannot be reached
    owned = owners(indices, owner_of_expert(ranges, experts))
    route = plan_route(owned, members)
    for member, reach in enumerate(ranges):
        wanted = [token for token, row in enumerate(indices) if any(int(each) in reach for each in row)]
        assert route.of(member).tolist() == wanted
    assert route.counts.sum() == len(route.tokens) == route.offsets[-1]


@pytest.mark.skipif(find_spec("asyncfabric._native._engine") is None, reason="needs the compiled engine: make build")
@given(choices(), st.integers(1, 9), st.data())
def test_rows_are_grouped_by_expert_in_order_and_aligned(drawn: tuple[int, Array], alignment: int, data: Any) -> None:
    experts, indices = drawn
    first = data.draw(st.integers(0, experts))
    mine = range(first, data.draw(st.integers(first, experts)))
    groups = group_rows(indices, mine, alignment)
    assert (groups.offsets % alignment == 0).all()
    at = 0
    for place, expert in enumerate(mine):
        wanted = [(row, int(choice)) for row, each in enumerate(indices) for choice in np.flatnonzero(each == expert)]
        assert groups.counts[place] == len(wanted)
        assert groups.offsets[place] == at
        end = at + len(wanted)
        assert list(zip(groups.row_of[at:end], groups.choice_of[at:end], strict=True)) == wanted
        at += -(-len(wanted) // alignment) * alignment
        assert (groups.row_of[end:at] == -1).all()
    assert len(groups.row_of) == at == groups.offsets[-1]
    # Pairs report the same the other way round: for each row its choices in order.
    for row in range(len(indices)):
        pairs = slice(groups.pair_offsets[row], groups.pair_offsets[row + 1])
        assert (groups.row_of[groups.position[pairs]] == row).all()
        assert (groups.pair_row[pairs] == row).all()
        assert groups.pair_choice[pairs].tolist() == [
            choice for choice, expert in enumerate(indices[row]) if int(expert) in mine
        ]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data(), st.integers(1, 40))
def test_passes_carry_each_row_once_and_never_overlap(counts: list[int], data: Any, room: int) -> None:
    receiver = data.draw(st.integers(0, len(counts) - 1))
    plan = PassPlan(np.array(counts), receiver, room)
    sent: list[list[int]] = [[] for _ in counts]
    queue: list[int] = []
    for number in range(plan.passes):
        area = [-1] * room
        senders = plan.senders(number)
        for sender in range(len(counts)):
            segment = plan.segment(sender, number)
            assert (segment.rows > 0) == (sender in senders)
            sent[sender].extend(range(segment.begin, segment.end))
            for row in range(segment.rows):
                assert area[segment.at + row] == -1, "two rows at one place"
                area[segment.at + row] = sender
        used = [each for each in area if each >= 0]
        assert area[: len(used)] == used, "rows lie without gaps"
        assert number == plan.passes - 1 or len(used) == room, "only the last pass may be short"
        queue.extend(used)
    assert sent == [list(range(count)) for count in counts]
    order = [sender for sender in circle(receiver, len(counts)) if counts[sender]]
    assert list(dict.fromkeys(queue)) == order, "the queue goes round the circle from the receiver on"


def test_rows_need_room() -> None:
    assert PassPlan(np.array([0, 0]), 1, 0).passes == 0
    with pytest.raises(ValueError, match="3 rows, but the area has no room"):
        PassPlan(np.array([3, 0]), 1, 0)


def shape_of(members: int, tokens: int, top_k: int, scales: int, private: int, area: int = 1 << 12) -> LaneShape:
    return LaneShape(
        members=members,
        max_tokens=tokens,
        top_k=top_k,
        fan_out=min(top_k, members),
        row_bytes=64,
        back_row_bytes=32,
        scales=scales,
        private=min(private, tokens),
        in_flight=2,
        area_bytes=area,
    )


shapes = st.builds(
    shape_of,
    members=st.integers(1, 9),
    tokens=st.integers(1, 40),
    top_k=st.integers(1, 10),
    scales=st.integers(0, 5),
    private=st.integers(0, 40),
    area=st.integers(1, 1 << 14),
)


@given(shapes, st.data(), st.integers(0, 1 << 40))
def test_a_record_is_read_as_it_was_written_and_touches_nothing_else(shape: LaneShape, data: Any, step: int) -> None:
    count = data.draw(st.integers(0, shape.max_tokens))
    member, reader = (data.draw(st.integers(0, shape.members - 1)) for _ in range(2))
    random = np.random.default_rng(count)
    counts = random.integers(0, shape.max_tokens + 1, size=shape.members)
    counts[reader] = count
    rows = Rows(
        random.integers(0, 99, size=count).astype(np.int32),
        random.integers(-1, 99, size=(count, shape.top_k)).astype(np.int32),
        random.random((count, shape.top_k), dtype=np.float32),
        random.random((count, shape.scales), dtype=np.float32),
    )
    front = np.full(shape.front_rows * shape.row_bytes, 0xA5, dtype=np.uint8)
    assert step_of(front, shape) == -1
    write_record(front, shape, member, step, counts, rows)
    length = record_bytes(shape, count)
    assert (front[: len(front) - length] == 0xA5).all()
    assert step_of(front, shape) == step
    found = read_record(front, shape, reader, member, step)
    assert found.step == step and np.array_equal(found.counts, counts)
    assert all(np.array_equal(one, other) for one, other in zip(found.rows, rows, strict=True))
    for wrong in ({"member": member + 1, "step": step}, {"member": member, "step": step + 1}):
        with pytest.raises(RemoteProtocolError, match="sent no record"):
            read_record(front, shape, reader, **wrong)


@given(shapes)
def test_parts_of_the_regions_do_not_overlap(shape: LaneShape) -> None:
    owner = np.zeros(shape.receive_bytes, dtype=np.int32)

    def claim(begin: int, length: int) -> None:
        assert not owner[begin : begin + length].any(), "two parts share bytes"
        assert begin >= 0 and begin + length <= len(owner)
        owner[begin : begin + length] = 1

    width = shape.row_bytes
    claim(0, width)  # the row of zeros
    for turn in range(shape.in_flight):
        for member in range(shape.members):
            slot = shape.slot_row(turn, member)
            claim((slot - shape.front_rows) * width, (shape.front_rows + shape.private) * width)
        claim(shape.area_row(turn) * width, shape.area_rows * width)
        claim(shape.back_offset(turn), shape.back_rows * shape.back_row_bytes)
    assert owner.all()
    assert record_bytes(shape, shape.max_tokens) <= shape.front_rows * width
    assert shape.area_rows or shape.private == shape.max_tokens


@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_experts_are_spread_over_ranks(experts: int, ranks: int, size: int) -> None:
    config = MoeConfig(num_experts=experts, top_k=1, hidden=16, max_tokens=1, ranks=ranks * size, node_size=size)
    held = [config.experts_of(rank) for rank in range(config.ranks)]
    assert [expert for each in held for expert in each] == list(range(experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1


@pytest.mark.parametrize("in_dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("node_size", [1, 8])
def test_a_prefill_of_64_ranks_needs_less_than_two_gib(in_dtype: str, node_size: int) -> None:
    config = MoeConfig(
        num_experts=256,
        top_k=8,
        hidden=7168,
        max_tokens=4096,
        ranks=64,
        in_dtype=in_dtype,
        scale_block=128 if in_dtype == "float8_e4m3fn" else 0,
        node_size=node_size,
    )
    assert buffer_bytes(config) < 2 << 30


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 5))
def test_lanes_join_each_rank_with_the_right_ones(nodes: int, size: int) -> None:
    config = MoeConfig(num_experts=16, top_k=2, hidden=16, max_tokens=4, ranks=nodes * size, node_size=size)
    for rank in range(config.ranks):
        lanes = plan_lanes(config, rank, range(config.ranks))
        if size == 1:
            assert [lane.ranks for lane in lanes] == [tuple(range(nodes))]
            continue
        across, inside = lanes
        assert across.ranks == tuple(range(rank % size, nodes * size, size))
        assert inside.ranks == tuple(range(rank // size * size, (rank // size + 1) * size))
        assert inside.shape.max_tokens == 4 * nodes

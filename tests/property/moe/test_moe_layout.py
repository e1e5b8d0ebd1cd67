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
from asyncfabric.moe.host.loops import record_loops
from asyncfabric.moe.host.passes import PassPlan, circle
from asyncfabric.moe.host.record import Records, Rows, find_route, read_records, write_records
from asyncfabric.moe.host.routing import Route, owner_of_expert, owners, plan_route
from asyncfabric.moe.host.session import plan_lanes

Array = np.ndarray[Any, Any]
compiled = pytest.mark.skipif(
    find_spec("asyncfabric._native._engine") is None, reason="needs the compiled engine: make build"
)


@st.composite
def choices(draw: Any) -> tuple[int, Array]:
    """Numbers of experts and random choices, -1 among them."""
    experts = draw(st.integers(1, 12))
    shape = (draw(st.integers(0, 20)), draw(st.integers(1, 10)))
    seed = draw(st.integers(0, 1 << 20))
    return experts, np.random.default_rng(seed).integers(-1, experts, size=shape).astype(np.int32)


@compiled
@given(choices(), st.sampled_from([np.int32, np.int64]))
def test_the_range_of_experts_is_that_of_numpy(drawn: tuple[int, Array], dtype: Any) -> None:
    _, experts = drawn
    wide = experts.astype(dtype) + (1 << 40 if dtype is np.int64 else 0)
    found = record_loops().range_of(wide)
    assert found == ((wide.min(), wide.max()) if wide.size else (0, 0))


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


@compiled
@given(choices(), st.integers(1, 9), st.integers(0, 1 << 20))
def test_the_compiled_route_is_that_of_numpy(drawn: tuple[int, Array], members: int, seed: int) -> None:
    experts, indices = drawn
    owner = np.random.default_rng(seed).integers(-1, members, size=experts)
    found, wanted = find_route(indices, owner, members), plan_route(owners(indices, owner), members)
    assert np.array_equal(found.tokens, wanted.tokens) and np.array_equal(found.offsets, wanted.offsets)
    for bad in (experts, -2, 1 << 30, -(1 << 31)):
        if indices.size:
            other = indices.copy()
            other[-1, -1] = bad
            with pytest.raises(IndexError, match="plan_route"):
                find_route(other, owner, members)
    for bad in (members, -2):
        with pytest.raises(IndexError, match="plan_route"):
            find_route(indices, np.append(owner, bad), members)


@compiled
@given(choices(), st.integers(1, 9), st.data())
def test_rows_are_grouped_by_expert_in_order_and_aligned(drawn: tuple[int, Array], alignment: int, data: Any) -> None:
    experts, indices = drawn
    first = data.draw(st.integers(0, experts))
    mine = range(first, data.draw(st.integers(first, experts)))
    weights = np.arange(indices.size, dtype=np.float32).reshape(indices.shape)
    groups = group_rows(indices, weights, mine, alignment)
    assert (groups.offsets % alignment == 0).all()
    at = 0
    for place, expert in enumerate(mine):
        wanted = [(row, int(choice)) for row, each in enumerate(indices) for choice in np.flatnonzero(each == expert)]
        assert groups.counts[place] == len(wanted)
        assert groups.offsets[place] == at
        end = at + len(wanted)
        assert list(zip(groups.row_of[at:end], groups.choice_of[at:end], strict=True)) == wanted
        at += -(-len(wanted) // alignment) * alignment
        assert (groups.row_of[end:at] == -1).all() and (groups.choice_of[end:at] == -1).all()
    assert len(groups.row_of) == at == groups.offsets[-1]
    # Pairs report the same the other way round: for each row its choices in order.
    for row in range(len(indices)):
        pairs = slice(groups.pair_offsets[row], groups.pair_offsets[row + 1])
        assert (groups.row_of[groups.position[pairs]] == row).all()
        wanted_choices = [choice for choice, expert in enumerate(indices[row]) if int(expert) in mine]
        assert groups.choice_of[groups.position[pairs]].tolist() == wanted_choices
        assert groups.weights[pairs].tolist() == weights[row, wanted_choices].tolist()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data(), st.integers(1, 40))
def test_passes_carry_each_row_once_and_never_overlap(counts: list[int], data: Any, room: int) -> None:
    receiver = data.draw(st.integers(0, len(counts) - 1))
    plan = PassPlan(counts, receiver, room)
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
    assert PassPlan([0, 0], 1, 0).passes == 0
    with pytest.raises(ValueError, match="3 rows, but the area has no room"):
        PassPlan([3, 0], 1, 0)


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


class Step:
    """Records of random tokens of all members, written each to its slot's front, with memory around each front."""

    GUARD = 96

    def __init__(self, shape: LaneShape, number: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.shape, self.number, experts = shape, number, 12
        self.owner = random.integers(-1, shape.members, size=experts)
        whole = 2 * self.GUARD + shape.front_rows * shape.row_bytes
        self.memory = np.full((shape.members, shape.members, whole), 0xA5, dtype=np.uint8)  # [reader, sender]
        self.about: list[Rows] = []
        self.routes: list[Route] = []
        for member in range(shape.members):
            tokens = int(random.integers(0, shape.max_tokens + 1))
            about = Rows(
                random.integers(0, 99, size=tokens).astype(np.int32),
                random.integers(-1, experts, size=(tokens, shape.top_k)).astype(np.int32),
                random.random((tokens, shape.top_k), dtype=np.float32),
                random.random((tokens, shape.scales), dtype=np.float32),
            )
            route = find_route(about.experts, self.owner, shape.members)
            fronts = [self.memory[reader, member, self.GUARD : -self.GUARD] for reader in range(shape.members)]
            write_records(fronts, member, number, about, self.owner, route)
            self.about.append(about)
            self.routes.append(route)

    def fronts(self, reader: int) -> list[Array]:
        return [self.memory[reader, member, self.GUARD : -self.GUARD] for member in range(self.shape.members)]

    def read(self, reader: int, number: int | None = None) -> Records:
        return read_records(self.fronts(reader), self.shape, reader, self.number if number is None else number)


@compiled
@given(shapes, st.data(), st.integers(0, 1 << 40))
def test_records_are_read_as_they_were_written_and_touch_nothing_else(shape: LaneShape, data: Any, number: int) -> None:
    step = Step(shape, number, data.draw(st.integers(0, 1 << 20)))
    for reader in range(shape.members):
        counts, offsets, rows = step.read(reader)
        assert counts.tolist() == [route.counts.tolist() for route in step.routes]
        assert offsets.tolist() == [0, *np.cumsum(counts[:, reader])]
        for member, (about, route) in enumerate(zip(step.about, step.routes, strict=True)):
            tokens, mine = route.of(reader), slice(offsets[member], offsets[member + 1])
            here = np.append(step.owner, -1)[about.experts[tokens]] == reader
            assert np.array_equal(rows.origins[mine], about.origins[tokens])
            assert np.array_equal(rows.experts[mine], np.where(here, about.experts[tokens], -1))
            assert np.array_equal(rows.weights[mine], about.weights[tokens])
            assert np.array_equal(rows.scales[mine], about.scales[tokens])
            untouched = step.memory.shape[2] - step.GUARD - shape.record_bytes(len(tokens))
            assert (step.memory[reader, member, :untouched] == 0xA5).all()
            assert (step.memory[reader, member, -step.GUARD :] == 0xA5).all()
        with pytest.raises(RemoteProtocolError, match=f"member 0 sent no record of step {number + 1}"):
            step.read(reader, number + 1)


def wrong_heads(shape: LaneShape, head: dict[str, int]) -> list[tuple[dict[str, int], str]]:
    """Return heads that lie, and what of the error names it."""
    lies = [({name: head[name] ^ bit}, "sent no record") for name in head if name != "rows" for bit in (1, 1 << 31)]
    many = (head["rows"] + 1, shape.max_tokens + 1, 1 << 20, 0xFFFFFFFF, 0x80000000)
    return [*lies, *(({"rows": rows}, "rows, at most") for rows in many)]


@compiled
@settings(max_examples=30)
@given(shapes, st.data())
def test_heads_that_lie_are_refused(shape: LaneShape, data: Any) -> None:
    step = Step(shape, 7, data.draw(st.integers(0, 1 << 20)))
    reader, liar = (data.draw(st.integers(0, shape.members - 1)) for _ in range(2))
    front = step.fronts(reader)[liar]
    fixed = np.dtype([("magic", "<u4"), ("member", "<u4"), ("step", "<u8"), ("rows", "<u4"), ("members", "<u4")])
    head = front[len(front) - shape.head_bytes :][: fixed.itemsize].view(fixed)
    counts = front[len(front) - shape.head_bytes + 32 :].view(np.uint32)
    right = {name: int(head[name][0]) for name in fixed.names or ()}
    for lie, error in wrong_heads(shape, right):
        for name, value in lie.items():
            head[name] = value
        with pytest.raises(RemoteProtocolError, match=f"member {liar} .*{error}"):
            step.read(reader)
        if "rows" in lie and lie["rows"] > shape.max_tokens:  # also when the count of the reader lies with it
            counts[reader] = lie["rows"]
            with pytest.raises(RemoteProtocolError, match=f"announces {lie['rows']} rows, at most {shape.max_tokens}"):
                step.read(reader)
            counts[reader] = right["rows"]
        for name in lie:
            head[name] = right[name]
    for receiver in range(shape.members):
        kept = int(counts[receiver])
        counts[receiver] = shape.max_tokens + 1 + data.draw(st.sampled_from([0, 1 << 31]))
        with pytest.raises(RemoteProtocolError, match="rows, at most"):
            step.read(reader)
        counts[receiver] = kept
    step.read(reader)


@compiled
@given(shapes, st.data())
def test_random_bytes_are_no_records(shape: LaneShape, data: Any) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    step = Step(shape, 7, 1)
    reader, liar = (data.draw(st.integers(0, shape.members - 1)) for _ in range(2))
    front = step.fronts(reader)[liar]
    front[:] = random.integers(0, 256, size=len(front))
    with pytest.raises(RemoteProtocolError, match=f"member {liar} sent no record"):
        step.read(reader)


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
        claim(shape.rest_offset(turn), shape.area_rows * width)
        claim(shape.back_offset(turn), shape.back_rows * shape.back_row_bytes)
    assert owner.all()
    assert shape.record_bytes(shape.max_tokens) <= shape.front_rows * width
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

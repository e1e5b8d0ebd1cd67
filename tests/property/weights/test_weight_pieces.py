"""The parts of an update that are pure: runs, tiles, the ring of staging memory, names, rosters."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_cases import Case, cases
from weight_fixture import shards_of

from asyncfabric._kernels.native import native_converting
from asyncfabric.errors import RemoteProtocolError
from asyncfabric.weights import Relay, all_sent, forwarded_by, plan_weights
from asyncfabric.weights.agreement import RosterPlans, roster_of
from asyncfabric.weights.channel import receiver_name, receiver_of
from asyncfabric.weights.memory import rows as rows_module
from asyncfabric.weights.memory import tiles as converting
from asyncfabric.weights.memory.rows import PLACE_ALIGN, Strided, written_run_bytes
from asyncfabric.weights.memory.tiles import convert_into, measure
from asyncfabric.weights.messages import Roster, Seat, Written, decode_message, encode_message
from asyncfabric.weights.plan.assignment import join_replica, leave_replica
from asyncfabric.weights.plan.formats import STORED_AS, block_maxima, cast, quantise, scales_of, to_float32
from asyncfabric.weights.plan.parts import MoveKind
from asyncfabric.weights.receiver.awaited import RowPlaces
from asyncfabric.weights.sender.program import Program
from asyncfabric.weights.sender.scratch import ScratchStaging
from asyncfabric.weights.sender.shards import Shards


@given(st.data())
def test_runs_are_the_elements_in_order(data: Any) -> None:
    """Any box of any array, in any order of its dimensions: offsets of runs give the bytes that numpy gives."""
    dims = data.draw(st.integers(1, 4))
    whole = [data.draw(st.integers(1, 5)) for _ in range(dims)]
    size = [data.draw(st.integers(1, length)) for length in whole]
    start = [data.draw(st.integers(0, length - part)) for length, part in zip(whole, size, strict=True)]
    item = data.draw(st.sampled_from([1, 2, 4]))
    array = np.random.default_rng(1).integers(0, 256, (*whole, item), dtype=np.uint8)
    order = [dim for dim in data.draw(st.permutations(range(dims))) if size[dim] > 1]
    lies = Strided(tuple(size[dim] for dim in order), tuple(array.strides[dim] for dim in order), item)
    at = sum(begin * step for begin, step in zip(start, array.strides[:-1], strict=True))
    box = array[tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))]
    ones = [dim for dim in range(dims) if size[dim] == 1]
    wanted = box.transpose([*ones, *order, dims]).reshape(-1)
    memory = array.reshape(-1)
    run = lies.run_bytes
    found = np.concatenate([memory[at + offset : at + offset + run] for offset in lies.offsets(run).tolist()])
    assert np.array_equal(found, wanted)
    assert np.array_equal(lies.gathered(memory, at), wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "VIEWED_RUN_BYTES", data.draw(st.sampled_from([1, 1 << 14])))
        parts = list(lies.parts(memory, at, data.draw(st.integers(1, 64))))
    assert np.array_equal(np.concatenate(parts), wanted)


def test_both_ends_count_by_one_rule() -> None:
    """In place where runs are long enough, else in the receiver's runs."""
    long = rows_module.DIRECT_RUN_BYTES
    source = Strided((4, long), (2 * long, 1), 1)
    assert written_run_bytes(source, 4 * long) == long and written_run_bytes(source, long) == long
    assert written_run_bytes(source, 150) == 150
    assert written_run_bytes(Strided((4, long - 1), (2 * long, 1), 1), 4 * (long - 1)) == 4 * (long - 1)
    assert written_run_bytes(None, 64) == 64


def same_tiles(rows: int, columns: int, origin: Any, low: list[int], size: list[int], dtype: str, to: str) -> None:
    random = np.random.default_rng(rows)
    values = (random.standard_normal((1, rows, columns)) * 10 ** random.uniform(-3, 3, (1, rows, 1))).astype(np.float32)
    shard = values if dtype == "float32" else cast(values, "float32", dtype)
    box = shard[:, low[0] : low[0] + size[0], low[1] : low[1] + size[1]]
    start = origin + np.array([0, *low])
    kind = MoveKind(dtype, to, 128 if to == "float8_e4m3fn" else 0, 0, 0, 1)
    for loops in (native_converting, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(converting, "_converting", loops)
            same_bits(shard, box, kind, origin, start)


def same_bits(shard: Any, box: Any, kind: MoveKind, origin: Any, start: Any) -> None:
    """Compare a box with what `arithmetic` makes of it, in columns, and its maxima."""
    dtype, to, size = kind.dtype, kind.to, box.shape[1:]
    out = np.zeros(box.shape, STORED_AS[to]).transpose(0, 2, 1).copy().transpose(0, 2, 1)
    if not kind.block:
        convert_into(out, box, kind, None, start, origin)
        assert np.array_equal(out, cast(box, dtype, to))
        return
    maxima = measure(shard, origin, kind)
    assert np.array_equal(maxima, block_maxima(to_float32(shard, dtype), (int(origin[1]), int(origin[2]))))
    convert_into(out, box, kind, maxima, start, origin)
    first = start[1:] // 128 - origin[1:] // 128
    last = -(-(start[1:] + np.array(size)) // 128) - origin[1:] // 128
    scales = scales_of(maxima[:, first[0] : last[0], first[1] : last[1]])
    wanted = quantise(to_float32(box, dtype), scales, (int(start[1]), int(start[2])))
    assert np.array_equal(out, wanted)


@settings(deadline=None)
@given(st.data())
def test_tiles_make_the_bits_of_the_whole(data: Any) -> None:
    rows, columns = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 1300))
    origin = np.array([0, data.draw(st.integers(0, 200)), data.draw(st.integers(0, 2000))])
    low = [data.draw(st.integers(0, length - 1)) for length in (rows, columns)]
    size = [data.draw(st.integers(1, length - at)) for length, at in zip((rows, columns), low, strict=True)]
    dtype = data.draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    same_tiles(rows, columns, origin, low, size, dtype, data.draw(st.sampled_from(["float8_e4m3fn", "float16", dtype])))


def test_rows_and_columns_are_converted_by_what_was_compiled_and_others_are_not() -> None:
    wide, kind = np.ones((64, 96), np.float32), MoveKind("float32", "bfloat16", 0, 0, 0, 1)
    rows, columns = np.zeros((64, 96), np.uint16), np.zeros((96, 64), np.uint16)
    for out in (rows, columns.T):
        assert converting.convert_plane(out, wide, kind, None, 0, 0) and (out == 0x3F80).all()
    spread = np.zeros((64, 192), np.uint16)[:, ::2]
    for out, plane in ((spread, wide), (rows[:, :48], wide[:, ::2])):
        assert not converting.convert_plane(out, plane, kind, None, 0, 0)
    assert not converting.convert_plane(rows.view(np.int16), wide, MoveKind("float32", "int16", 0, 0, 0, 1), None, 0, 0)
    with pytest.raises(ValueError, match="sizes do not fit"):
        converting.convert_plane(rows[1:], wide, kind, None, 0, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_of_boxes_that_cut_blocks_on_all_sides(dtype: str) -> None:
    same_tiles(400, 2300, np.array([0, 50, 70]), [10, 20], [350, 2200], dtype, "float8_e4m3fn")


@pytest.mark.parametrize("shortest", [1, 256])
@given(case=cases())
def test_trainers_make_as_many_writes_as_receivers_count(shortest: int, case: Case) -> None:
    plan = plan_weights(case.moves, trainers=case.trainers, receivers=case.receivers, replicas=["a", "b"])
    made: Counter[tuple[str, int]] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "DIRECT_RUN_BYTES", shortest)
        for rank in range(plan.trainers):
            for box in Program(plan, rank, Shards(plan, rank, shards_of(plan, rank, case.shard))).boxes:
                for row in box.rows:
                    made[row.receiver, rank] += box.weight_bytes // row.run_bytes + row.shape.scale_runs
        for one in plan.replicas:
            for receiver in range(plan.receivers):
                rows = np.flatnonzero(plan.pieces.receiver[plan.row_piece] == receiver)
                reported = RowPlaces(plan, receiver).writes(rows, one.senders[rows].astype(np.int64))
                name = receiver_name(one.name, receiver)
                assert reported == {rank: made[name, rank] for rank in range(plan.trainers) if made[name, rank]}


@given(st.integers(64, 2000), st.lists(st.integers(1, 900), max_size=40), st.data())
def test_places_in_the_ring_never_overlap_and_never_leave_it(length: int, sizes: list[int], data: Any) -> None:
    async def body() -> None:
        staging = ScratchStaging(SimpleNamespace(length=length))  # type: ignore[arg-type]
        taken: deque[tuple[int, int]] = deque()
        for size in sizes:
            padded = -(-size // PLACE_ALIGN) * PLACE_ALIGN
            if padded > length:
                with pytest.raises(ValueError, match="give more scratch_bytes"):
                    await staging.take(size)
                continue
            while True:
                with anyio.move_on_after(0):
                    at = await staging.take(size)
                    break
                staging.give_back(taken.popleft()[0])
            assert at >= 0 and at + padded <= length
            assert all(at + padded <= begin or at >= end for begin, end in taken)
            taken.append((at, at + padded))
            assert sum(end - begin for begin, end in taken) <= staging.taken_bytes <= staging.highest_bytes <= length
            while taken and data.draw(st.booleans()):
                which = data.draw(st.integers(0, len(taken) - 1))  # units end in any order
                staging.give_back(taken[which][0])
                del taken[which]
        staging.clear()
        assert staging.taken_bytes == 0

    anyio.run(body, backend="trio")


@given(cases(), st.data())
def test_rows_have_one_number_everywhere(case: Case, data: Any) -> None:
    """What senders and forwarders call a row is what the receiver's column calls it."""
    relay = Relay(data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2)))
    plan = plan_weights(
        case.moves, trainers=case.trainers, receivers=case.receivers, replicas=["a", "b", "c"], relay=relay
    )
    seen: list[tuple[int, int]] = []
    for batch in all_sent(plan):
        assert np.array_equal(plan.row_piece[batch.row], batch.piece)
        for replica, row in zip(batch.replica.tolist(), batch.row.tolist(), strict=True):
            assert plan.replicas[replica].senders[row] == batch.rank
            seen.append((replica, row))
    for one in plan.replicas:
        for receiver in range(plan.receivers):
            reported = forwarded_by(plan, one.name, receiver)
            assert np.array_equal(plan.row_piece[reported.from_row], reported.from_piece)
            assert np.array_equal(plan.row_piece[reported.to_row], reported.to_piece)
            assert np.array_equal(plan.row_move[reported.from_row], plan.row_move[reported.to_row])
            seen += zip(reported.replica.tolist(), reported.to_row.tolist(), strict=True)
    assert sorted(seen) == [(replica, row) for replica in range(3) for row in range(plan.rows)]


@given(cases())
def test_a_roster_makes_the_coordinators_plan(case: Case) -> None:
    relay = Relay(2, 1)
    plan = plan_weights(case.moves, trainers=case.trainers, receivers=case.receivers, replicas=["a", "b"], relay=relay)
    elsewhere = RosterPlans(plan.with_replicas(()))
    now = leave_replica(join_replica(plan, "c"), "a")
    roster = decode_message(encode_message(roster_of(now, 7, True)))
    assert isinstance(roster, Roster)
    made = elsewhere.plan(roster)
    assert made.digest == now.digest and elsewhere.plan(roster) is made
    wrong = Roster(7, now.digest, True, [Seat(each.name, each.seat + 1, each.parent) for each in roster.replicas])
    with pytest.raises(RemoteProtocolError, match="the plan of version 7"):
        elsewhere.plan(wrong)
    twice = Roster(7, now.digest, True, roster.replicas * 2)
    with pytest.raises(RemoteProtocolError, match="stands twice"):
        elsewhere.plan(twice)


def test_names_and_bytes_of_messages() -> None:
    assert receiver_of(receiver_name("a/b", 3)) == ("a/b", 3)
    for bad in ("trainer-0", "a/", "a/x"):
        with pytest.raises(ValueError, match="no receiver's name"):
            receiver_of(bad)
    message = Written(3, b"12345678", b"87654321")
    assert decode_message(encode_message(message)) == message
    with pytest.raises(RemoteProtocolError, match="no message of a weight update"):
        decode_message(b"\x81\xa4type\xa3odd")

"""Transfers made of two lists: states, refusals, handles used again and released, telemetry; on both faces."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from faces import Face
from two_agents import BYTES, TwoAgents, finished, notes_of


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_bytes_arrive_and_nothing_beside_them(two: TwoAgents, operation: str) -> None:
    before = (two.source.copy(), two.target.copy())
    spans = [(100, 4095), (8192, 1), (65536, 8193)]
    handle = two.a.initialize_xfer(operation, two.local(*spans), two.remote(*spans), "b")
    assert two.ran(handle) == "DONE"
    source, target = (before[0].copy(), before[1].copy())
    for at, length in spans:
        if operation == "WRITE":
            target[at : at + length] = source[at : at + length]
        else:
            source[at : at + length] = target[at : at + length]
    assert (two.source == source).all() and (two.target == target).all()


def test_states_before_and_after(two: TwoAgents) -> None:
    handle = two.made()
    with pytest.raises(two.face.error("NotPosted")):
        two.a.check_xfer_state(handle)
    assert two.ran(handle) == "DONE"
    assert two.a.check_xfer_state(handle) == "DONE"


def test_a_handle_is_transferred_again(two: TwoAgents) -> None:
    handle = two.made()
    for value in (1, 2, 3):
        two.source[:4096] = value
        assert two.ran(handle) == "DONE" and two.same()


def test_many_transfers_are_in_flight(two: TwoAgents) -> None:
    handles = [two.made(at=4096 * index) for index in range(64)]
    for handle in handles:
        two.a.transfer(handle)
    assert {finished(two.a, handle) for handle in handles} == {"DONE"} and two.same(0, 64 * 4096)


def test_empty_descriptors_move_nothing(two: TwoAgents) -> None:
    assert two.ran(two.made(length=0)) == "DONE"


def test_descriptors_of_nothing_are_part_of_a_list(fresh: TwoAgents) -> None:
    two, nothing = fresh, (0, 0, 0)
    base, there = two.source.ctypes.data, two.target.ctypes.data
    local = [(base, 100, 0), nothing, (base + 4096, 50, 0), nothing]
    remote = [(there + 9, 100, 0), nothing, (there + 8192, 50, 0), nothing]
    sides = two.a.get_xfer_descs(local, "DRAM"), two.a.get_xfer_descs(remote, "DRAM")
    if not two.face.differs("nothing"):
        with pytest.raises(two.face.error("NotFound")):
            two.a.initialize_xfer("WRITE", *sides, "b")
    for agent in (two.a, two.b):
        agent.register_memory([(*nothing, "")], "DRAM")
    two.a.add_remote_agent(two.b.get_agent_metadata())
    before = two.target.copy()
    before[9:109], before[8192:8242] = two.source[:100], two.source[4096:4146]
    assert two.ran(two.a.initialize_xfer("WRITE", *sides, "b")) == "DONE" and (two.target == before).all()
    prepared = two.a.prep_xfer_dlist("", local, "DRAM"), two.a.prep_xfer_dlist("b", remote, "DRAM")
    two.source[:100] = before[9:109] = 7
    assert two.ran(two.a.make_prepped_xfer("WRITE", prepared[0], [1, 0], prepared[1], [3, 0])) == "DONE"
    assert (two.target == before).all()
    only = two.a.get_xfer_descs([nothing], "DRAM")
    assert two.ran(two.a.initialize_xfer("READ", only, only, "b")) == "DONE"


@pytest.mark.parametrize("operation", ["COPY", "write", ""])
def test_operations_have_two_names(two: TwoAgents, operation: str) -> None:
    with pytest.raises(KeyError):
        two.made(operation)


def test_lists_that_do_not_match(two: TwoAgents) -> None:
    local = two.local((0, 4096))
    for remote in (two.remote((0, 2048), (2048, 2048)), two.remote((0, 2048))):
        with pytest.raises(two.face.error("InvalidParam")):
            two.a.initialize_xfer("WRITE", local, remote, "b")


def test_memory_outside_a_registration(two: TwoAgents) -> None:
    end = BYTES - 2048
    good_local, good_remote = two.local((0, 4096)), two.remote((0, 4096))
    base = two.target.ctypes.data
    for local, remote in (
        (two.remote((0, 4096)), good_remote),
        (two.local((end, 4096)), good_remote),
        (good_local, two.remote((end, 4096))),
        (good_local, two.local((0, 4096))),
        (good_local, two.a.get_xfer_descs([(base, 4096, 0)], "VRAM")),
        (good_local, two.a.get_xfer_descs([(base, 4096, 3)], "DRAM")),
    ):
        with pytest.raises(two.face.error("NotFound")):
            two.a.initialize_xfer("WRITE", local, remote, "b")


def test_lists_without_descriptors(two: TwoAgents) -> None:
    empty = two.face.bindings.nixlXferDList(two.face.bindings.DRAM_SEG)
    with pytest.raises(two.face.error("NotFound")):
        two.a.initialize_xfer("WRITE", empty, empty, "b")


def test_arguments_of_other_types(two: TwoAgents) -> None:
    remote = two.remote((0, 4096))
    for local in (None, two.source_descs, [(two.source.ctypes.data, 4096, 0)]):
        with pytest.raises(TypeError):
            two.a.initialize_xfer("WRITE", local, remote, "b")
    for note in (3, None):
        with pytest.raises(TypeError):
            two.made(note=note)
    with pytest.raises(KeyError):
        two.a.initialize_xfer("WRITE", two.local((0, 4096)), remote, "b", b"", ["NOPE"])


def test_agents_nobody_added(two: TwoAgents) -> None:
    for name in ("nobody", b"nobody"):
        with pytest.raises(two.face.error("NotFound")):
            two.a.initialize_xfer("WRITE", two.local((0, 4096)), two.remote((0, 4096)), name)


def test_agents_are_named_by_what_add_remote_agent_returned(two: TwoAgents) -> None:
    handle = two.a.initialize_xfer("WRITE", two.local((0, 64)), two.remote((0, 64)), b"b")
    assert two.ran(handle) == "DONE"


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_an_agent_transfers_to_itself(two: TwoAgents, operation: str) -> None:
    handle = two.a.initialize_xfer(operation, two.local((0, 4096)), two.local((8192, 4096)), "a", b"self")
    assert two.ran(handle) == "DONE"
    assert (two.source[:4096] == two.source[8192:12288]).all()
    assert notes_of(two.a, 1) == {"a": [b"self"]}


def test_memory_that_its_owner_gave_back(fresh: TwoAgents) -> None:
    handle = fresh.made()
    assert fresh.ran(handle) == "DONE"
    fresh.b.deregister_memory(fresh.target_descs)
    if fresh.face.differs("deregistered"):
        fresh.source[:4096] ^= 255
        kept = fresh.target.copy()
        try:
            assert fresh.ran(handle) == "ERR"
        except Exception as error:
            assert type(error).__module__ == fresh.face.bindings.nixlUnknownError.__module__, repr(error)
        assert (fresh.target == kept).all()
    else:
        assert fresh.ran(handle) == "DONE"
    fresh.b.register_memory(fresh.target_descs)


def test_release_is_repeated_without_harm(two: TwoAgents) -> None:
    handle = two.made()
    two.ran(handle)
    two.a.release_xfer_handle(handle)
    two.a.release_xfer_handle(handle)
    handle.release()
    never_posted = two.made()
    two.a.release_xfer_handle(never_posted)


def test_handles_that_are_dropped_release_themselves(two: TwoAgents) -> None:
    for _ in range(100):
        two.ran(two.made())
    gc.collect()
    assert two.ran(two.made()) == "DONE"


def test_backend_and_cost_of_a_transfer(two: TwoAgents) -> None:
    handle = two.made()
    assert two.ran(handle) == "DONE"
    assert two.a.query_xfer_backend(handle) == "UCX"
    duration, margin, method = two.a.estimate_xfer_cost(handle)
    assert isinstance(duration, int) and isinstance(margin, int) and isinstance(method, str)


def test_telemetry_is_off_by_default(two: TwoAgents) -> None:
    handle = two.made()
    for _ in range(2):
        with pytest.raises(two.face.error("NoTelemetry")):
            two.a.get_xfer_telemetry(handle)
        two.ran(handle)


def test_telemetry_of_a_transfer(face: Face) -> None:
    with TwoAgents(face, capture_telemetry=True) as two:
        spans = [(0, 4096), (8192, 4096)]
        handle = two.a.initialize_xfer("WRITE", two.local(*spans), two.remote(*spans), "b")
        with pytest.raises(face.error("NotPosted")):
            two.a.get_xfer_telemetry(handle)
        assert two.ran(handle) == "DONE"
        telemetry = two.a.get_xfer_telemetry(handle)
        assert isinstance(telemetry, face.bindings.nixlXferTelemetry)
        assert telemetry.totalBytes == 8192 and telemetry.descCount in (1, 2)
        assert all(
            isinstance(one, int) for one in (telemetry.startTime, telemetry.postDuration, telemetry.xferDuration)
        )
        assert telemetry.startTime > 0 and telemetry.xferDuration >= 0
        del handle


@pytest.mark.slow
def test_threads_share_an_agent(face: Face) -> None:
    """Eight threads write blocks of their own over one pair of agents, with lists and handles of their own."""
    threads, rounds, block = 8, 25, 4096
    strict = face.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    with TwoAgents(face, sync_mode=strict) as two:
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                for turn in range(rounds):
                    at = (index * rounds + turn) * block
                    handle = two.made("WRITE" if turn % 2 else "READ", at, block, b"%d" % index)
                    assert two.ran(handle) == "DONE" and two.same(at, block)
                    two.a.release_xfer_handle(handle)
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert failures == []
        notes = notes_of(two.b, threads * rounds)
        assert sorted(notes["a"]) == sorted(b"%d" % index for index in range(threads) for _ in range(rounds))


def test_numpy_lists_of_a_thousand_blocks(two: TwoAgents) -> None:
    def rows(base: int, order: Any) -> Any:
        found = np.zeros((len(order), 3), np.uint64)
        found[:, 0] = base + order * 1024
        found[:, 1] = 1024
        return two.a.get_xfer_descs(found, "DRAM")

    random = np.random.default_rng(11)
    here, there = random.permutation(1024), random.permutation(1024)
    handle = two.a.initialize_xfer(
        "WRITE", rows(two.source.ctypes.data, here), rows(two.target.ctypes.data, there), "b"
    )
    assert two.ran(handle) == "DONE"
    assert (two.source.reshape(1024, 1024)[here] == two.target.reshape(1024, 1024)[there]).all()

"""Agents, registrations and metadata on both faces: memory is registered, known to the peer, and forgotten again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from faces import Face
from two_agents import BYTES, TwoAgents

NONE: list[Any] = []


def test_agents_have_names_and_one_backend(two: TwoAgents) -> None:
    assert two.a.name == "a" and "UCX" in two.a.get_plugin_list()
    for found in (two.a.get_plugin_mem_types("UCX"), two.a.get_backend_mem_types("UCX")):
        assert "DRAM_SEG" in found
    assert isinstance(two.a.get_plugin_params("UCX"), dict) and isinstance(two.a.get_backend_params("UCX"), dict)
    assert two.a.get_backend_params("NOPE") == {} and two.a.get_backend_mem_types("NOPE") == []
    assert two.a.get_plugin_params("NOPE") == {} and two.a.get_plugin_mem_types("NOPE") == []


def test_backends_are_created_once_and_only_known_ones(two: TwoAgents) -> None:
    with pytest.raises(two.face.error("NotFound")):
        two.a.create_backend("NOPE")
    with pytest.raises(two.face.error("InvalidParam")):
        two.a.create_backend("UCX")


def test_backends_are_created_later(face: Face) -> None:
    agent = face.agent("late", backends=NONE)
    memory = np.zeros(64, np.uint8)
    rows = [(memory.ctypes.data, 64, 0, "")]
    if not face.differs("backends"):
        with pytest.raises(face.error("NotFound")):
            agent.register_memory(rows, "DRAM")
        with pytest.raises(face.error("InvalidParam")):
            agent.get_agent_metadata()
    agent.create_backend("UCX")
    agent.deregister_memory(agent.register_memory(rows, "DRAM"))
    assert agent.get_agent_metadata()


def test_configurations_are_checked(face: Face) -> None:
    with pytest.raises(ValueError):
        face.agent("")
    with pytest.raises(TypeError):
        face.api.nixl_agent_config(sync_mode=3)
    assert list(face.agent("unknown backend", backends=["NOPE"]).backends) == []
    assert face.api.nixl_agent("defaults").name == "defaults"
    strict = face.agent("strict", sync_mode=face.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    assert strict.name == "strict"


def test_registrations_repeat_and_overlap(two: TwoAgents) -> None:
    base = two.source.ctypes.data
    again = two.a.register_memory([(base, BYTES, 0, "")], "DRAM")
    part = two.a.register_memory([(base + 4096, 8192, 0, "")], "DRAM")
    two.a.deregister_memory(again)
    two.a.deregister_memory(part)
    handle = two.made(note=b"still")
    assert two.ran(handle) == "DONE" and two.same()


def test_the_last_of_equal_registrations_ends_it(fresh: TwoAgents) -> None:
    fresh.a.deregister_memory(fresh.source_descs)
    with pytest.raises(fresh.face.error("NotFound")):
        fresh.made()
    with pytest.raises(fresh.face.error("NotFound")):
        fresh.pages("", 4096, 1)
    with pytest.raises(fresh.face.error("NotFound")):
        fresh.a.deregister_memory(fresh.source_descs)
    fresh.a.register_memory(fresh.source_descs)
    assert fresh.ran(fresh.made()) == "DONE" and fresh.same()


def test_memory_that_was_never_registered_is_not_deregistered(two: TwoAgents) -> None:
    other = np.zeros(64, np.uint8)
    with pytest.raises(two.face.error("NotFound")):
        two.a.deregister_memory(two.a.get_reg_descs([(other.ctypes.data, 64, 0, "")], "DRAM"))


def test_registrations_that_cannot_be(fresh: TwoAgents) -> None:
    base = fresh.source.ctypes.data
    with pytest.raises(TypeError):
        fresh.a.register_memory([(base, 64, 0)], "DRAM")
    with pytest.raises(KeyError):
        fresh.a.register_memory([(base, 64, 0, "")], "DRAM", ["NOPE"])
    with pytest.raises(fresh.face.error("Backend")):
        fresh.a.register_memory([(base, 64, 0, "")], "VRAM")


def test_empty_memory_registers(fresh: TwoAgents) -> None:
    fresh.a.deregister_memory(fresh.a.register_memory([(fresh.source.ctypes.data, 0, 0, "")], "DRAM"))


def test_host_memory_is_not_queried(two: TwoAgents) -> None:
    rows = [(two.source.ctypes.data, 64, 0, "")]
    with pytest.raises(two.face.error("NotSupported")):
        two.a.query_memory(rows, "UCX", "DRAM")
    with pytest.raises(ValueError):
        two.a.query_memory(rows, "NOPE", "DRAM")


def test_metadata_names_its_agent_as_bytes(two: TwoAgents) -> None:
    assert isinstance(two.b.get_agent_metadata(), bytes)
    assert two.a.add_remote_agent(two.b.get_agent_metadata()) == b"b"
    assert two.a.add_remote_agent(two.b.get_agent_metadata()) == b"b"
    assert two.a.check_remote_metadata("b") and not two.a.check_remote_metadata("nobody")


def test_metadata_that_is_none(two: TwoAgents) -> None:
    with pytest.raises(two.face.error("InvalidParam")):
        two.a.add_remote_agent(two.a.get_agent_metadata())
    for junk in (b"junk", b"", "junk"):
        with pytest.raises(two.face.error("Mismatch")):
            two.a.add_remote_agent(junk)


def test_metadata_that_is_cut_off(fresh: TwoAgents) -> None:
    with pytest.raises((fresh.face.error("NotFound"), fresh.face.error("Mismatch"))):
        fresh.a.add_remote_agent(fresh.b.get_agent_metadata()[:-10])
    assert fresh.a.check_remote_metadata("b") is fresh.face.differs("metadata")


def test_metadata_names_what_is_registered_when_it_is_taken(two: TwoAgents) -> None:
    more = np.zeros(8192, np.uint8)
    rows = [(more.ctypes.data, 4096, 0)]
    before = two.b.get_agent_metadata()
    registered = two.b.register_memory([(more.ctypes.data, 8192, 0, "")], "DRAM")
    two.a.add_remote_agent(before)
    descs = two.a.get_xfer_descs(rows, "DRAM")
    assert not two.a.check_remote_metadata("b", descs)
    with pytest.raises(two.face.error("NotFound")):
        two.a.initialize_xfer("WRITE", two.local((0, 4096)), descs, "b")
    two.a.add_remote_agent(two.b.get_agent_metadata())
    assert two.a.check_remote_metadata("b", descs)
    assert two.ran(two.a.initialize_xfer("WRITE", two.local((0, 4096)), descs, "b")) == "DONE"
    assert (more[:4096] == two.source[:4096]).all() and not more[4096:].any()
    two.b.deregister_memory(registered)


def test_handles_live_on_while_metadata_grows(two: TwoAgents) -> None:
    handle, pages, local = two.made(), two.pages("b", 4096, 2), two.pages("", 4096, 2)
    more = np.zeros(4096, np.uint8)
    registered = two.b.register_memory([(more.ctypes.data, 4096, 0, "")], "DRAM")
    two.meet()
    assert two.ran(handle) == "DONE" and two.same()
    assert two.ran(two.a.make_prepped_xfer("WRITE", local, [1], pages, [1])) == "DONE" and two.same(4096)
    two.b.deregister_memory(registered)


def test_descriptors_are_known_with_their_type_and_bounds(two: TwoAgents) -> None:
    base = two.target.ctypes.data
    for rows, memory, known in (
        ([(base, 4096, 0)], "DRAM", True),
        ([(base, 4096, 0)], "VRAM", False),
        ([(base + BYTES - 8, 16, 0)], "DRAM", False),
        ([(base, 16, 0), (two.source.ctypes.data, 16, 0)], "DRAM", False),
    ):
        assert two.a.check_remote_metadata("b", two.a.get_xfer_descs(rows, memory)) is known


def test_partial_metadata_reaches_its_part_alone(fresh: TwoAgents) -> None:
    part = np.zeros(8192, np.uint8)
    registered = fresh.b.register_memory([(part.ctypes.data, 8192, 0, "")], "DRAM")
    third, memory = fresh.face.agent("third"), np.full(4096, 7, np.uint8)
    third.register_memory([(memory.ctypes.data, 4096, 0, "")], "DRAM")
    inside = third.get_xfer_descs([(part.ctypes.data, 4096, 0)], "DRAM")
    outside = third.get_xfer_descs([(fresh.target.ctypes.data, 4096, 0)], "DRAM")

    with pytest.raises(fresh.face.error("NotFound")):  # no connection is known yet
        third.add_remote_agent(fresh.b.get_partial_agent_metadata(registered, False))
    assert not third.check_remote_metadata("b")
    nothing = fresh.face.bindings.nixlRegDList(fresh.face.bindings.DRAM_SEG)
    assert third.add_remote_agent(fresh.b.get_partial_agent_metadata(nothing, True)) == b"b"
    assert third.check_remote_metadata("b") and not third.check_remote_metadata("b", inside)
    assert third.add_remote_agent(fresh.b.get_partial_agent_metadata(registered, True, ["UCX"])) == b"b"
    assert third.check_remote_metadata("b", inside) and not third.check_remote_metadata("b", outside)
    local = third.get_xfer_descs([(memory.ctypes.data, 4096, 0)], "DRAM")
    handle = third.initialize_xfer("WRITE", local, inside, "b", b"part")
    third.transfer(handle)
    while third.check_xfer_state(handle) == "PROC":
        pass
    assert (part[:4096] == 7).all()
    third.add_remote_agent(fresh.b.get_agent_metadata())
    assert third.check_remote_metadata("b", outside)
    third.release_xfer_handle(handle)
    del handle, third
    gc.collect()


def test_partial_metadata_of_unregistered_memory(two: TwoAgents) -> None:
    other = np.zeros(64, np.uint8)
    with pytest.raises(two.face.error("NotFound")):
        two.b.get_partial_agent_metadata(two.b.get_reg_descs([(other.ctypes.data, 64, 0, "")], "DRAM"), True)


def test_removal_ends_what_was_made_for_the_agent(fresh: TwoAgents) -> None:
    not_found = fresh.face.error("NotFound")
    handle, local, remote = fresh.made(), fresh.pages("", 4096, 1), fresh.pages("b", 4096, 1)
    fresh.a.remove_remote_agent("b")
    fresh.a.remove_remote_agent("b")
    fresh.a.remove_remote_agent("nobody")

    def all_stale() -> None:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: fresh.a.transfer(handle),
            lambda: fresh.a.make_prepped_xfer("WRITE", local, [0], remote, [0]),
        )
        for call in calls:
            with pytest.raises(not_found):
                call()
        with pytest.raises(fresh.face.error("NotPosted")):
            fresh.a.check_xfer_state(handle)

    all_stale()
    assert not fresh.a.check_remote_metadata("b")
    for call in (lambda: fresh.a.send_notif("b", b"x"), lambda: fresh.a.make_connection("b"), fresh.made):
        with pytest.raises(not_found):
            call()
    fresh.a.add_remote_agent(fresh.b.get_agent_metadata())
    assert fresh.a.check_remote_metadata("b")
    all_stale()  # they belong to the agent as it was known before
    assert fresh.ran(fresh.made()) == "DONE" and fresh.same()
    fresh.a.make_connection("b")

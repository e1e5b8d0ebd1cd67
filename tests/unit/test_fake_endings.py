"""Ends that only the fake can choose: killed peers, restarts, drains that time out, control calls that fail late."""

from __future__ import annotations

import pytest
from fake_stage import Stage, set_up
from parties import Party

from asyncfabric._bridge.engine import CompletionKind, EngineStatusError, StatusKind
from asyncfabric._bridge.status import StatusCode
from asyncfabric.config import FabricConfig
from asyncfabric.testing import FakeEngine, FakeNetwork


def test_a_killed_peer_fails_what_is_in_flight_and_nothing_else(stages: list[Stage]) -> None:
    network = FakeNetwork(hold=True)
    stage, other = set_up(stages, network), set_up(stages, network)
    third = stage.writer.key_of(other.reader, other.target)
    stage.write(1)
    stage.writer.engine.submit_write(2, stage.source, 0, 64, third, 0, -1)
    stage.engines[1].kill()
    lost = stage.writer.take_kind(CompletionKind.PEER_LOST)
    assert (lost.value, lost.code) == (stage.peer, StatusCode.PEER_DEAD)
    assert stage.codes() == {1: StatusCode.PEER_DEAD}
    network.deliver()
    stage.writer.take_ok(2)
    stage.write(3)
    assert stage.codes()[3] == StatusCode.PEER_DEAD
    states = {listed["id"]: listed["state"] for listed in stage.writer.engine.peers()}
    assert states[stage.peer] == 2


def test_what_a_killed_engine_had_in_flight_never_arrives(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True))
    stage.write(1)
    stage.engines[0].kill()
    assert stage.network.deliver() == 0
    assert (stage.arrived, stage.value) == (0, 0)
    assert stage.codes() == {1: StatusCode.CLOSED}
    with pytest.raises(EngineStatusError) as caught:
        stage.write(2)
    assert caught.value.status_kind == StatusKind.CLOSED
    assert not stage.writer.engine.rails()[0]["up"]
    stage.writer.engine.submit_close(3, False)
    stage.writer.take_ok(3)


def test_a_restarted_engine_has_the_address_but_not_the_keys(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork())
    old = stage.engines[1]
    with pytest.raises(ValueError, match="place"):
        FakeEngine(stage.config, stage.network, place=old.fake_address.place)
    address = old.address()
    old.kill()
    reborn = FakeEngine(stage.config, stage.network, place=old.fake_address.place)
    stage.engines.append(reborn)
    assert reborn.incarnation() != old.incarnation()
    stage.write(1)
    assert stage.codes() == {1: StatusCode.STALE_KEY}
    stage.writer.engine.submit_connect(2, address)
    assert stage.writer.take(2).code == StatusCode.PEER_REJECTED
    stage.writer.engine.submit_signal(3, [stage.peer], 5)
    assert stage.codes()[3] == StatusCode.PEER_DEAD
    assert stage.writer.connect(Party(reborn)) != stage.peer


def test_engines_of_other_networks_are_out_of_reach(stages: list[Stage]) -> None:
    here, there = set_up(stages, FakeNetwork()), set_up(stages, FakeNetwork())
    here.writer.engine.submit_connect(1, there.reader.engine.address())
    assert here.writer.take(1).status_kind == StatusKind.PEER


@pytest.mark.parametrize("can_flush", [True, False])
def test_a_drain_ends_at_its_deadline(stages: list[Stage], can_flush: bool) -> None:
    stage = set_up(stages, FakeNetwork(hold=True, window=1, can_flush=can_flush), FabricConfig(drain_deadline=0.02))
    op = stage.writer.engine.submit_scatter(1, stage.source, [(stage.key, 0, 0, 64), (stage.key, 0, 64, 64)], stage.imm)
    stage.writer.engine.cancel(op)
    assert stage.codes() == {}
    ended = stage.writer.take(1)
    assert ended.bytes == 0, "what did not come back is not known to have left"
    assert ended.code == (StatusCode.CANCELLED if can_flush else StatusCode.DRAIN_TIMEOUT)
    assert stage.writer.take_kind(CompletionKind.PEER_LOST).value == stage.peer
    stage.network.release()
    assert (stage.arrived, stage.value) == (0, 0), "memory was touched after the op had ended"
    quarantined = stage.writer.engine.statistics()["quarantined_regions"]
    assert quarantined == (not can_flush)
    released = stage.writer.release(stage.source)
    assert released.code == (StatusCode.OK if can_flush else StatusCode.DRAIN_TIMEOUT)
    if not can_flush:
        assert stage.writer.engine.region_info(stage.source).quarantined


def test_only_keys_opened_after_a_loss_connect_again(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True, window=1), FabricConfig(drain_deadline=0.02))
    op = stage.writer.engine.submit_scatter(1, stage.source, [(stage.key, 0, 0, 64), (stage.key, 0, 64, 64)], stage.imm)
    stage.writer.engine.cancel(op)
    assert stage.writer.take_kind(CompletionKind.PEER_LOST).value == stage.peer
    stage.network.release()
    new = stage.writer.key_of(stage.reader, stage.target)
    stage.write(2)
    stage.writer.engine.submit_signal(3, [stage.peer], 5)
    assert {cookie: stage.codes()[cookie] for cookie in (2, 3)} == {2: StatusCode.PEER_DEAD, 3: StatusCode.PEER_DEAD}
    assert stage.writer.write(stage.source, 0, 64, new).code == StatusCode.OK
    stage.write(4)
    assert stage.codes()[4] == StatusCode.OK


@pytest.mark.parametrize("cancel_unposted", [True, False])
def test_closing_with_work_in_flight(stages: list[Stage], cancel_unposted: bool) -> None:
    stage = set_up(stages, FakeNetwork(hold=True, window=1))
    stage.write(1)
    stage.write(2)
    stage.writer.engine.submit_close(9, cancel_unposted)
    assert stage.codes() == ({2: StatusCode.CANCELLED} if cancel_unposted else {})
    assert not [one for one in stage.writer.seen if one.kind == CompletionKind.CLOSED]
    with pytest.raises(EngineStatusError) as caught:
        stage.write(3)
    assert caught.value.status_kind == StatusKind.CLOSED
    stage.network.deliver()
    assert stage.writer.take_ok(9).kind == CompletionKind.CLOSED
    assert stage.codes()[1] == StatusCode.OK
    assert stage.codes()[2] == (StatusCode.CANCELLED if cancel_unposted else StatusCode.OK)


def test_a_close_that_cannot_drain_is_bounded(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True), FabricConfig(drain_deadline=0.02))
    stage.write(1)
    stage.writer.engine.submit_close(9, True)
    stage.writer.take_ok(9)
    assert stage.codes() == {1: StatusCode.PEER_DEAD}
    stage.network.release()
    assert stage.arrived == 0


def test_control_calls_can_be_held_and_fail(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold_control=True))
    engine = stage.writer.engine
    engine.submit_allocate(1, 64, -1, 3)
    engine.submit_connect(2, stage.reader.engine.address())
    engine.submit_release(3, stage.source)
    assert not stage.writer.gather()
    assert stage.network.in_flight == 3
    stage.network.fail_next_control(StatusCode.NO_MEMORY, raw=12)
    stage.network.deliver()
    refused = stage.writer.take(1)
    assert (refused.code, refused.raw, refused.value) == (StatusCode.NO_MEMORY, 12, 0)
    assert engine.last_error()
    stage.writer.take_ok(2)
    stage.writer.take_ok(3)
    stage.network.fail_next_control(StatusCode.TRANSPORT, count=2)
    engine.submit_allocate(4, 64, -1, 3)
    stage.reader.engine.submit_release(5, stage.target)
    stage.network.release()
    assert stage.writer.take(4).code == stage.reader.take(5).code == StatusCode.TRANSPORT
    assert stage.reader.release(stage.target).code == StatusCode.OK


def test_control_calls_of_an_engine_that_died_meanwhile_end_as_closed(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold_control=True))
    stage.writer.engine.submit_allocate(1, 64, -1, 3)
    stage.engines[0].kill()
    stage.network.deliver()
    assert stage.writer.take(1).code == StatusCode.CLOSED


def test_a_device_that_is_not_there(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork())
    stage.writer.engine.submit_allocate(1, 64, 0, 3)
    ended = stage.writer.take(1)
    assert ended.status_kind == StatusKind.DEVICE
    assert "device 0" in stage.writer.engine.last_error()


def test_memory_that_cannot_be_had(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork())
    stage.writer.engine.submit_allocate(1, 1 << 46, -1, 3)
    ended = stage.writer.take(1)
    assert (ended.code, ended.value) == (StatusCode.NO_MEMORY, 0)
    assert str(1 << 46) in stage.writer.engine.last_error()
    assert stage.writer.allocate(64)


def test_memory_of_the_caller_is_not_shown_again(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork())
    region = stage.writer.register(bytearray(64))
    with pytest.raises(EngineStatusError) as caught:
        stage.writer.engine.region_memory(region)
    assert caught.value.status_kind == StatusKind.VALUE

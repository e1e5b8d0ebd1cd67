"""What only the fake can be told to do: hold, reorder, fail, die. Here INV-2 is seen with work in flight, deterministically."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator

import pytest

from asyncfabric._bridge.engine import CompletionKind, EngineStatusError, StatusKind
from asyncfabric._bridge.status import StatusCode
from asyncfabric.config import FabricConfig
from asyncfabric.testing import FakeEngine, FakeNetwork
from parties import WRITE, Party

PAGE = 64


class Stage:
    """A writer, a reader, a region in each, a key, and a counter, all on one network."""

    def __init__(self, network: FakeNetwork, config: FabricConfig | None = None, length: int = 4096) -> None:
        hold, network.hold = network.hold, False
        hold_control, network.hold_control = network.hold_control, False
        self.network, self.config, self.length = network, config or FabricConfig(), length
        self.engines = [FakeEngine(self.config, network), FakeEngine(self.config, network)]
        self.writer, self.reader = (Party(engine) for engine in self.engines)
        self.source, self.target = self.writer.allocate(length), self.reader.allocate(length)
        self.writer.fill(self.source, b"x" * length)
        self.key = self.writer.key_of(self.reader, self.target)
        self.peer = self.writer.connect(self.reader)
        self.counter, self.imm = self.reader.engine.open_counter(-1)
        network.hold, network.hold_control = hold, hold_control

    def write(self, cookie: int, length: int | None = None, *, counted: bool = True) -> int:
        """Submit a write of the first bytes."""
        length = self.length if length is None else length
        imm = self.imm if counted else -1
        return self.writer.engine.submit_write(cookie, self.source, 0, length, self.key, 0, imm)

    @property
    def value(self) -> int:
        """What was counted."""
        return self.reader.engine.counter_value(self.counter)

    @property
    def arrived(self) -> int:
        """How many bytes of the target are the writer's."""
        return self.reader.bytes_of(self.target).count(b"x")

    def codes(self) -> dict[int, int]:
        """What the writer's completions say, by cookie."""
        self.writer.gather()
        return {one.cookie: one.code for one in self.writer.seen if one.kind == CompletionKind.OP}


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    """Collect stages; their engines are closed after the test."""
    made: list[Stage] = []
    yield made
    for stage in made:
        for engine in stage.engines:
            engine.close()


def set_up(stages: list[Stage], network: FakeNetwork, config: FabricConfig | None = None, length: int = 4096) -> Stage:
    """Return a stage that is closed after the test."""
    stages.append(Stage(network, config, length))
    return stages[-1]


def test_held_work_is_in_flight_until_it_is_delivered(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True))
    op = stage.write(1)
    progress = stage.writer.engine.progress(op)
    assert (progress.bytes_posted, progress.outstanding, progress.peer) == (4096, 1, stage.peer)
    assert stage.writer.engine.peers()[0]["ops_in_flight"] == 1
    assert (stage.network.in_flight, stage.arrived, stage.codes()) == (1, 0, {})
    assert stage.network.deliver() == 1
    assert (stage.arrived, stage.value, stage.codes()) == (4096, 1, {1: StatusCode.OK})
    assert stage.network.deliver() == 0


def test_a_cancelled_op_in_flight_ends_only_when_it_was_drained(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True, window=2, request_bytes=1024))
    op = stage.write(1)
    stage.network.deliver(1)
    stage.writer.engine.cancel(op)
    assert stage.codes() == {}, "completed while requests were in flight"
    assert stage.writer.engine.progress(op).outstanding == 2
    stage.network.deliver(1)
    assert stage.codes() == {}
    stage.network.deliver()
    ended = stage.writer.take(1)
    assert (ended.code, ended.bytes) == (StatusCode.CANCELLED, 3072)
    assert (stage.arrived, stage.value) == (3072, 0)


def test_cancelling_what_was_posted_completely_changes_nothing(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True))
    stage.writer.engine.cancel(stage.write(1))
    assert stage.codes() == {}
    stage.network.deliver()
    assert (stage.codes(), stage.arrived, stage.value) == ({1: StatusCode.OK}, 4096, 1)


def test_the_window_keeps_later_ops_unposted(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True, window=1))
    first, second = stage.write(1), stage.write(2)
    assert stage.writer.engine.progress(first).outstanding == 1
    assert stage.writer.engine.progress(second).bytes_posted == 0
    stage.writer.engine.cancel(second)
    assert stage.codes() == {2: StatusCode.CANCELLED}
    stage.network.release()
    assert (stage.codes()[1], stage.value) == (StatusCode.OK, 1)


@pytest.mark.parametrize("seed", range(8))
def test_a_count_never_runs_ahead_of_its_bytes(stages: list[Stage], seed: int) -> None:
    stage = set_up(
        stages, FakeNetwork(hold=True, seed=seed, request_bytes=512), FabricConfig(rails=("local",) * 3, stripe_bytes=1024)
    )
    assert not stage.writer.engine.rails()[0]["ordered"]
    stage.write(1)
    while stage.value == 0:
        assert stage.network.deliver(1) == 1
    assert stage.arrived == 4096
    assert stage.writer.take_ok(1).rails == 0b111
    assert stage.value == 1


def test_the_seed_decides_the_order(stages: list[Stage]) -> None:
    def order(seed: int) -> list[int]:
        stage = set_up(stages, FakeNetwork(hold=True, seed=seed))
        for cookie in range(10):
            stage.write(cookie, 8)
        stage.network.deliver()
        return list(stage.codes())

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(3)) == list(range(10))


def test_a_failed_request_harms_its_op_alone(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(request_bytes=1024))
    stage.network.fail_next(StatusCode.TRANSPORT, raw=-110)
    stage.write(1)
    failed = stage.writer.take(1)
    assert (failed.code, failed.raw, failed.peer) == (StatusCode.TRANSPORT, -110, stage.peer)
    assert (stage.value, stage.writer.engine.statistics()["ops_failed"]) == (0, 1)
    stage.write(2)
    stage.writer.take_ok(2)
    assert (stage.value, stage.arrived) == (1, 4096)


def test_revoked_and_released_under_a_write_in_flight(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True))
    stage.write(1)
    stage.reader.engine.submit_revoke(5, stage.target)
    stage.reader.take_ok(5)
    stage.network.deliver()
    assert (stage.codes(), stage.arrived, stage.value) == ({1: StatusCode.STALE_KEY}, 0, 0)
    stage.writer.engine.close_key(stage.key)
    stage.key = stage.writer.key_of(stage.reader, stage.target)
    stage.write(2)
    assert stage.reader.release(stage.target).code == StatusCode.OK
    stage.network.deliver()
    assert stage.codes()[2] == StatusCode.STALE_KEY


def test_release_waits_for_the_memorys_last_user(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True))
    stage.write(1)
    stage.writer.engine.submit_release(9, stage.source)
    with pytest.raises(EngineStatusError):
        stage.write(2)
    stage.writer.gather()
    assert not [one for one in stage.writer.seen if one.cookie == 9], "released while a write was in flight"
    stage.network.deliver()
    stage.writer.take_ok(1)
    stage.writer.take_ok(9)


def test_a_key_with_a_forged_right_or_secret_is_refused_by_the_target(stages: list[Stage]) -> None:
    from dataclasses import replace

    from asyncfabric.testing.fake_keys import FakeKey

    stage = set_up(stages, FakeNetwork())
    weak = stage.reader.allocate(64, access=2)
    honest = FakeKey.unpack(stage.reader.engine.region_key(weak, 2, 0, 64))
    real = FakeKey.unpack(stage.reader.engine.region_key(stage.target, WRITE, 0, 64))
    for forged in (
        replace(honest, access=3),
        replace(real, secret=real.secret ^ 1),
        replace(real, length=1 << 40),
        replace(real, generation=real.generation + 1),
        replace(real, region=real.region + 100),
    ):
        key, _ = stage.writer.engine.open_key(forged.pack())
        ended = stage.writer.write(stage.source, 0, 64, key)
        assert ended.code in (StatusCode.ACCESS_DENIED, StatusCode.STALE_KEY)
    assert stage.arrived == 0


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
    assert ended.bytes == 64
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


def test_back_pressure_survives_cancelling_and_dying(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(), FabricConfig(max_messages=1, drain_deadline=0.02))
    for cookie in (1, 2, 3):
        stage.writer.engine.submit_send(cookie, stage.peer, b"%d" % cookie)
    assert (stage.codes(), stage.network.in_flight) == ({1: StatusCode.OK}, 2)
    assert stage.reader.engine.next_message() is not None
    assert stage.codes() == {1: StatusCode.OK, 2: StatusCode.OK}
    stage.engines[1].kill()
    assert stage.codes()[3] == StatusCode.PEER_DEAD
    assert stage.network.in_flight == 0


def test_a_write_posted_for_a_closed_counter_is_stale_for_the_next_one(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True))
    stage.write(1)
    stage.reader.engine.close_counter(stage.counter)
    stage.counter, _ = stage.reader.engine.open_counter(stage.imm)
    stage.write(2)
    stage.network.deliver()
    assert stage.value == 1
    assert stage.reader.engine.statistics()["stale_arrivals"] == 1


def test_pages_arrive_in_batches_that_count_what_they_carry(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True), length=600 * PAGE)
    lists = (array("q", range(600)), stage.key, array("q", range(600)))
    stage.writer.engine.submit_write_pages(1, stage.source, *lists, PAGE, PAGE, PAGE, 0, 0, stage.imm)
    for numbers in (lists[0], lists[2]):
        numbers[:] = array("q", bytes(8 * 600))  # the caller may reuse its lists at once
    while stage.network.deliver(1):
        assert stage.arrived == stage.value * PAGE
    assert stage.value == 600


def test_rails_that_cannot_read_say_so(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(can_read=False))
    assert not stage.writer.engine.rails()[0]["can_read"]
    key = stage.writer.key_of(stage.reader, stage.target)
    stage.writer.engine.submit_read(1, stage.source, 0, 64, key, 0)
    assert stage.codes() == {1: StatusCode.UNSUPPORTED}


def test_an_idle_fake_has_no_thread(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork())

    def tickers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if "ticker" in thread.name]

    stage.write(1)
    assert not tickers()
    watch, _ = stage.writer.engine.open_watch()
    stage.writer.engine.arm_watch(watch, 2, 0)
    (ticker,) = tickers()
    stage.writer.engine.watch_store(watch, 1)
    ticker.join(20)
    assert not tickers()
    stage.writer.engine.arm_watch(watch, 3, 1)
    assert len(tickers()) == 1
    stage.engines[0].close()
    assert not tickers()


def test_engines_without_a_network_share_that_of_the_process() -> None:
    first, second = FakeEngine(), FakeEngine()
    try:
        assert Party(first).connect(Party(second))
    finally:
        first.close()
        second.close()

"""What only the fake can be reported: hold, reorder, fail. INV-2 is seen with work in flight, deterministically."""

from __future__ import annotations

import threading
from array import array
from dataclasses import replace

import pytest
from fake_stage import Stage, set_up
from parties import WRITE, Party

from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.status import StatusCode
from asyncfabric.config import FabricConfig
from asyncfabric.testing import FakeEngine, FakeNetwork
from asyncfabric.testing.fake_keys import FakeKey

PAGE = 64


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
        stages,
        FakeNetwork(hold=True, seed=seed, request_bytes=512),
        FabricConfig(rails=("local",) * 3, stripe_bytes=1024),
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


def test_back_pressure_survives_cancelling_and_dying(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(), FabricConfig(drain_deadline=0.02))
    taken = dict.fromkeys(range(1, 65), StatusCode.OK)
    for cookie in range(1, 67):
        stage.writer.engine.submit_send(cookie, stage.peer, b"%d" % cookie)
    assert (stage.codes(), stage.network.in_flight) == (taken, 2)
    assert len(stage.reader.engine.take_messages(1)) == 1
    assert stage.codes() == taken | {65: StatusCode.OK}
    stage.engines[1].kill()
    assert stage.codes()[66] == StatusCode.PEER_DEAD
    assert stage.network.in_flight == 0


def test_an_imm_is_opened_again_when_what_counts_for_its_last_counter_has_ended(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True))
    engine = stage.reader.engine
    stage.write(1)
    engine.close_counter(stage.counter)
    with pytest.raises(EngineStatusError) as caught:
        engine.open_counter(stage.imm)
    assert caught.value.code == StatusCode.UNCONFIRMED
    (closing,) = engine.closings(-1)
    assert closing.imm == stage.imm and len(closing.peers) == 1 and engine.closings(stage.imm + 1) == []
    assert engine.statistics()["unconfirmed_closes"] == 1
    stage.write(2)  # submitted for the next one, which is not open when it arrives
    engine.arm_closed(77, stage.imm)
    stage.reader.gather()
    assert not [one for one in stage.reader.seen if one.cookie == 77]
    stage.network.deliver()
    assert stage.reader.take_ok(77).value == stage.imm
    stage.counter, _ = engine.open_counter(stage.imm)
    stage.write(3)
    stage.network.deliver()
    assert stage.value == 1
    assert engine.statistics()["stale_arrivals"] == 2 and engine.statistics()["unconfirmed_closes"] == 0


def test_pages_arrive_in_batches_that_count_what_they_carry(stages: list[Stage]) -> None:
    stage = set_up(stages, FakeNetwork(hold=True), length=600 * PAGE)
    lists = (array("q", range(600)), stage.key, array("q", range(600)))
    stage.writer.engine.submit_write_pages(1, stage.source, *lists, PAGE, PAGE, PAGE, 0, 0, stage.imm)
    for numbers in (lists[0], lists[2]):
        numbers[:] = array("q", bytes(8 * 600))  # the caller may reuse its lists at once
    while stage.network.deliver(1):
        assert stage.arrived == stage.value * PAGE
    assert stage.value == 600


def test_rails_that_cannot_read_report_it(stages: list[Stage]) -> None:
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

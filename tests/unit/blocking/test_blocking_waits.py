"""Threads that wait without an event loop: one leads, all are woken, and whoever leaves strands nobody.

The interleavings are chosen: hooks run between the last look of the thread that leads and its sleep.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from blocking_pair import LENGTH, SOON_S, Call, Pair, blocked, open_pair, until

import asyncfabric as af
from asyncfabric import blocking
from asyncfabric.testing import FakeNetwork


def complete_elsewhere(p: Pair) -> None:
    """Let everything arrive, and another thread take the completions and hand them out."""
    p.network.deliver()
    Call(p.writer._dispatcher.drain).result()


@pytest.mark.parametrize("moment", ["before_arm", "after_arm"])
@pytest.mark.parametrize("completed", [lambda p: p.network.deliver(), complete_elsewhere], ids=["arrives", "is taken"])
def test_what_comes_between_the_last_look_and_the_sleep_wakes(moment: str, completed: Callable[[Pair], Any]) -> None:
    with open_pair(hold=True) as p:
        transfer = p.writer.write(p.source[:8], p.key, 0)
        setattr(p.engine, moment, lambda: completed(p))
        assert Call(transfer.wait).result().bytes == 8


@pytest.mark.parametrize("moment", ["before_arm", "after_arm"])
def test_a_close_between_the_last_look_and_the_sleep_wakes(moment: str) -> None:
    with open_pair() as p:
        counter = p.writer.counter()
        setattr(p.engine, moment, lambda: Call(counter.close).result())
        with pytest.raises(af.ClosedError, match="ImmCounter"):
            Call(counter.wait, 1).result()
        blocked(p.writer, 0)


def test_a_look_at_a_counter_brings_on_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pair(hold=True) as p, p.reader.counter() as counter:
        p.writer.write(p.source[:8], p.key, 0, imm=counter.imm)
        monkeypatch.setattr(p.reader._dispatcher.engine, "assist", p.network.deliver)
        assert counter.value == 1


@pytest.mark.parametrize("leaver", range(4))
def test_whoever_leaves_by_a_deadline_the_others_are_still_woken(leaver: int) -> None:
    with open_pair() as p:
        peer = p.writer.connect(p.writer.address)
        counters = [p.writer.counter() for _ in range(4)]
        gone = threading.Event()
        calls: list[Call] = []

        def leave(counter: blocking.ImmCounter) -> None:
            try:
                counter.wait(1, deadline=0.05)
            finally:
                gone.set()

        for position, counter in enumerate(counters):
            calls.append(Call(leave, counter) if position == leaver else Call(counter.wait, 1))
            if not gone.is_set():
                until(lambda: len(p.writer.why()) >= 1)
        assert gone.wait(SOON_S)
        assert isinstance(calls[leaver].join().error, TimeoutError)
        for position in (3, 0, 2, 1):
            p.writer.signal(peer, counters[position].imm)
            if position != leaver:
                assert calls[position].result() == 1
        blocked(p.writer, 0)


def test_the_end_of_the_leading_wait_hands_the_lead_on() -> None:
    with open_pair(hold=True) as p:
        transfers = [p.writer.write(p.source[:8], p.key, 0) for _ in range(8)]
        calls = []
        for count, transfer in enumerate(transfers, 1):
            calls.append(Call(transfer.wait))
            blocked(p.writer, count)
        for call in calls:
            p.network.deliver(1)
            assert call.result().bytes == 8
        blocked(p.writer, 0)


def test_a_passed_deadline_leaves_the_transfer_going() -> None:
    with open_pair(hold=True) as p:
        transfer = p.writer.write(p.source[:8], p.key, 0)
        for deadline in (0, 0.01):
            with pytest.raises(TimeoutError, match=rf"write of 8 bytes .* after {deadline:g} s: 0 of 8 bytes"):
                transfer.wait(deadline)
        with pytest.raises(TimeoutError, match="2 of 2 transfers"):
            blocking.wait_all([transfer, p.writer.write(p.source[:8], p.key, 8)], 0.01)
        assert not transfer.done and transfer.waiters == () and len(p.writer.why()) == 2
        p.network.deliver()
        assert transfer.wait(0).bytes == 8 and transfer.done
        assert bytes(p.target.memory[:8]) == bytes(p.source.memory[:8])


def test_a_wait_with_a_deadline_takes_what_came_by_then() -> None:
    with open_pair(hold=True) as p:
        transfer = p.writer.write(p.source[:8], p.key, 0)
        p.network.deliver()
        assert transfer.wait(0).bytes == 8


def test_deadlines_of_the_other_waits() -> None:
    with open_pair(af.FabricConfig(max_ops=1), hold=True) as p:
        counter = p.writer.counter()
        with pytest.raises(TimeoutError, match=r"has 0 of 3 arrivals after 0\.01 s"):
            counter.wait(3, deadline=0.01)
        with pytest.raises(TimeoutError, match="no message came"):
            p.writer.messages().receive(0.01)
        with p.writer.watch() as word, pytest.raises(TimeoutError, match="did not change"):
            word.wait(0.01)
        p.writer.write(p.source[:8], p.key, 0)
        with pytest.raises(TimeoutError, match="1 transfers are in flight"):
            p.writer.wait_writable(deadline=0.01)
        assert counter.waiters == ()
        p.network.deliver()
        p.writer.wait_writable(deadline=SOON_S)


def test_waits_that_are_given_up_again_and_again_leave_nothing_behind() -> None:
    with open_pair(af.FabricConfig(max_ops=4)) as p:
        counter = p.reader.counter()
        imm, parked = counter.imm, p.reader._dispatcher.parked
        p.network.hold = True
        p.writer.write(p.source[:8], p.key, 0, imm=imm)
        counter.close()
        open_waits: list[Callable[[], Any]] = [
            lambda: p.reader.open_counter(imm, deadline=0),
            lambda: p.reader.messages().receive(0),
            lambda: p.reader.counter(7).wait(1, deadline=0),
        ]
        for wait in open_waits:
            with pytest.raises(TimeoutError):
                wait()
        before = len(parked)
        for _ in range(50):
            with pytest.raises(TimeoutError):
                p.reader.open_counter(imm, deadline=0)
            with pytest.raises(TimeoutError):
                p.reader.messages().receive(0)
        assert len(parked) == before and not p.reader._dispatcher.message_waiters
        for _ in range(3):
            p.writer.write(p.source[:8], p.key, 0)
        for _ in range(50):
            with pytest.raises(TimeoutError):
                p.writer.wait_writable(deadline=0)
        assert len(p.writer._dispatcher.parked) == 5
        assert not any(call.waiters for call in p.writer._dispatcher.parked.values())  # type: ignore[attr-defined]
        p.network.release()
        p.writer.wait_writable(deadline=SOON_S)
        p.reader.open_counter(imm, deadline=SOON_S).close()
        p.reader._dispatcher.drain()
        assert len(parked) == before - 1


@pytest.mark.parametrize("bad", [-1, float("nan"), 2e9, True, "1"])
def test_deadlines_are_checked(bad: Any) -> None:
    with open_pair(hold=True) as p:
        transfer = p.writer.write(p.source[:8], p.key, 0)
        for wait in (transfer.wait, p.writer.messages().receive, lambda bad: p.writer.counter().wait(1, deadline=bad)):
            with pytest.raises((TypeError, ValueError), match="deadline must be"):
                wait(bad)


def test_cancelling_drains_and_then_the_memory_is_free() -> None:
    with open_pair(window=1, hold=True, request_bytes=16) as p:
        transfer = p.writer.write(p.source[:64], p.key, 0)
        waiting = [Call(transfer.wait) for _ in range(3)]
        blocked(p.writer, 3)
        transfer.cancel()
        assert not transfer.done, "one request is posted, and may still read the memory"
        p.network.deliver()
        for call in waiting:
            assert isinstance(call.join().error, af.TransferError)
        with pytest.raises(af.TransferError, match="16 of 64 bytes had left"):
            transfer.wait()
        transfer.cancel()


def test_closing_wakes_everybody() -> None:
    with open_pair() as p:
        counter, stream = p.writer.counter(), p.writer.messages()
        with p.writer.watch() as word:
            waits = [lambda: counter.wait(5), stream.receive, word.wait, lambda: counter.wait(9), stream.receive]
            calls = []
            for count, wait in enumerate(waits, 1):
                calls.append(Call(wait))
                blocked(p.writer, count)
            closers = [Call(p.writer.close) for _ in range(3)]
            for closer in closers:
                closer.result()
            for call in calls:
                assert isinstance(call.join().error, af.ClosedError)
        for late in (
            lambda: counter.wait(1),
            stream.receive,
            p.writer.counter,
            lambda: p.writer.write(p.source, p.key, 0),
        ):
            with pytest.raises(af.ClosedError):
                late()
        p.writer.close()


def test_closing_lets_those_who_wait_for_transfers_have_their_end() -> None:
    with open_pair(hold=True) as p:
        transfers = [p.writer.write(p.source[:8], p.key, 0) for _ in range(4)]
        calls = [Call(transfer.wait) for transfer in transfers]
        blocked(p.writer, 4)
        closing = Call(p.writer.close)
        until(lambda: p.writer.closed)
        p.network.release()
        assert [call.result().bytes for call in calls] == [8] * 4
        closing.result()


@pytest.fixture
def press_ctrl_c() -> Iterator[Callable[[], None]]:
    """Interrupts the main thread from another one, and returns when it has been.

    A SIGINT just before the main thread enters poll() leaves a flag that nobody looks at until the call ends. SIGUSR1,
    whose handler does nothing, ends it.
    """
    taken = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        taken.set()
        signal.default_int_handler(number, frame)

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not taken.wait(0.002):
            signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    before = signal.signal(signal.SIGINT, interrupt), signal.signal(signal.SIGUSR1, lambda number, frame: None)
    yield press
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGUSR1, before[1])


@pytest.mark.parametrize("leads", [True, False])
def test_ctrl_c_ends_a_wait_and_nothing_else(leads: bool, press_ctrl_c: Callable[[], None]) -> None:
    with open_pair(hold=True) as p:
        transfer, other = p.writer.write(p.source[:8], p.key, 0), p.writer.write(p.source[:8], p.key, 8)
        first = Call(other.wait) if not leads else None
        if first is not None:
            blocked(p.writer, 1)

        def press() -> None:
            blocked(p.writer, 1 if leads else 2)
            press_ctrl_c()

        pressing = Call(press)
        with pytest.raises(KeyboardInterrupt):
            transfer.wait(SOON_S)
        pressing.result()
        second = Call(transfer.wait)
        blocked(p.writer, 1 if leads else 2)
        p.network.deliver()
        assert second.result().bytes == other.wait(SOON_S).bytes == 8
        if first is not None:
            assert first.result().bytes == 8


def test_ctrl_c_while_the_fabric_closes_cancels_drains_and_closes(press_ctrl_c: Callable[[], None]) -> None:
    with open_pair(window=1, hold=True) as p:
        posted, unposted = (p.writer.write(p.source[:8], p.key, at) for at in (0, 8))

        def press() -> None:
            until(lambda: p.writer.closed)
            blocked(p.writer, 1)
            press_ctrl_c()
            until(lambda: unposted.done)
            p.network.deliver()

        pressing = Call(press)
        with pytest.raises(KeyboardInterrupt):
            p.writer.close()
        pressing.result()
        assert p.writer._dispatcher.closed and posted.result().bytes == 8
        with pytest.raises(af.TransferError, match="cancelled"):
            unposted.result()


@pytest.mark.parametrize("seed", range(6))
def test_random_threads_leave_nobody_asleep(seed: int) -> None:
    """Eight threads write, wait with and without deadlines, cancel and count; every wait ends."""
    with open_pair(seed=seed) as p:
        counter = p.reader.counter()
        peer = p.writer.connect(p.reader.address)
        counted = [0] * 8

        def work(number: int) -> None:
            chance = random.Random(seed * 8 + number)
            for _ in range(60):
                kind = chance.randrange(4)
                if kind == 0:
                    p.writer.signal(peer, counter.imm).wait(SOON_S)
                    counted[number] += 1
                    counter.wait(counted[number], deadline=SOON_S)
                    continue
                transfer = p.writer.write(p.source[: chance.randrange(512)], p.key, 0)
                if kind == 1:
                    transfer.cancel()
                try:
                    transfer.wait(SOON_S if kind < 3 else 0)
                except TimeoutError:
                    assert kind == 3
                    transfer.wait(SOON_S)
                except af.TransferError:
                    assert kind == 1

        for call in [Call(work, number) for number in range(8)]:
            call.result()
        assert counter.wait(sum(counted), deadline=SOON_S) == sum(counted)
        assert p.writer.why() == p.reader.why() == []
        blocked(p.writer, 0)


@pytest.mark.parametrize("engine", ["fake", "native"])
def test_threads_write_wait_cancel_and_one_closes_at_once(engine: str) -> None:
    if engine == "native":
        pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
    for round_number in range(3):
        with open_pair() if engine == "fake" else open_native() as p:
            submitted = threading.Barrier(9)

            def work(number: int, p: Pair = p, submitted: threading.Barrier = submitted) -> list[blocking.Transfer]:
                mine = []
                for turn in range(10_000):
                    if turn == 20:
                        submitted.wait(SOON_S)
                    try:
                        transfer = p.writer.write(p.source[: 8 * number + 8], p.key, 0)
                        mine.append(transfer)
                        if turn % 3 == 0:
                            transfer.cancel()
                        transfer.wait()
                    except af.TransferError:
                        assert turn % 3 == 0
                    except af.ClosedError:
                        break
                return mine

            def close(p: Pair = p, submitted: threading.Barrier = submitted) -> None:
                submitted.wait(SOON_S)
                p.writer.close()

            calls = [Call(work, number) for number in range(8)]
            Call(close).result()
            for call in calls:
                mine = call.result()
                assert len(mine) >= 20 and all(transfer.done for transfer in mine), round_number


@contextmanager
def open_native() -> Iterator[Pair]:
    """Open a pair over the compiled engine."""
    with blocking.open_fabric() as reader, blocking.open_fabric() as writer:
        source, target = writer.allocate(LENGTH), reader.allocate(LENGTH)
        writer.connect(reader.address)
        yield Pair(FakeNetwork(), writer, reader, source, target, target.key())

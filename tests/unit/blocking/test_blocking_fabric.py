"""A blocking fabric as a whole: how it begins and ends, its regions and peers, forks, and what is warned of."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blocking_pair import SOON_S, Call, HookedEngine, blocked, open_pair, until

import asyncfabric as af
from asyncfabric import blocking
from asyncfabric.testing import FakeEngine, FakeNetwork

OpenFabric = Callable[[], Any]


@pytest.fixture(params=["fake", "native"])
def open_fabric(request: pytest.FixtureRequest) -> Iterator[OpenFabric]:
    """Yield what opens a blocking fabric: over a fake engine, or over the compiled one."""
    if request.param == "native":
        pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
        yield blocking.open_fabric
    else:
        network = FakeNetwork()
        yield lambda: blocking.open_fabric(engine_factory=lambda config: FakeEngine(config, network))


def test_all_that_waits(open_fabric: OpenFabric) -> None:
    with open_fabric() as reader, open_fabric() as writer:
        assert [report.error for report in writer.warm([reader.address])] == [None]
        peer = writer.connect(reader.address)
        buffer = np.arange(512, dtype=np.uint64)
        source, target = writer.register(buffer, access="read-write"), reader.allocate(4096)
        key = af.RegionKey.from_bytes(bytes(target.key()))
        with reader.counter() as counter:
            batch = writer.write_pages(source, [0, 1], key, [7, 6], page_bytes=512, imm=counter.imm)
            one = writer.scatter(source, [af.ScatterTarget(key, 8, 0, 16)], imm=counter.imm)
            assert [result.bytes for result in blocking.wait_all([batch, one, writer.signal(peer, counter.imm)])] == [
                1024,
                16,
                0,
            ]
            assert counter.wait(4, deadline=SOON_S) == 4
            assert next(iter(counter)) == 4
        assert bytes(target.memory[7 * 512 :]) == buffer.tobytes()[:512]
        assert writer.read(key, 0, source[0:8]).wait(SOON_S).bytes == 8 and buffer[0] == 1
        writer.send(peer, b"note").wait(SOON_S)
        message = reader.messages().receive(SOON_S)
        assert message.payload == b"note" and message.peer.incarnation == writer.address.incarnation
        assert reader.messages().take_nowait() == []
        imm = counter.imm
        with reader.open_counter(imm, deadline=SOON_S) as again, writer.watch() as word:
            assert again.value == 0
            word.store(3)
            assert word.wait(SOON_S) == (0, 3)
        target.revoke()
        with pytest.raises(af.StaleKeyError):
            writer.write(source[0:8], key, 0).wait(SOON_S)
        writer.disconnect(peer)
        source.release()
        target.release()
        assert writer.regions() == reader.regions() == () and writer.why() == []
    assert writer.closed
    writer.close()


def test_a_write_after_a_word_leaves_without_anybody_waiting() -> None:
    pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
    with blocking.open_fabric() as fabric, fabric.watch() as word, fabric.counter() as counter:
        source, target = fabric.allocate(64), fabric.allocate(64)
        late = fabric.write(source, target.key(), 0, imm=counter.imm, after=word.reaches(4))
        assert not late.done
        word.store(4)
        assert counter.wait(1, deadline=SOON_S) == 1 and late.wait(SOON_S).bytes == 64
        source.release()
        target.release()


def test_an_exception_goes_on_unchanged_when_all_is_drained() -> None:
    with open_pair() as p, pytest.raises(ZeroDivisionError):
        opening = blocking.open_fabric(engine_factory=lambda config: HookedEngine(config, p.network))
        with opening as fabric:
            source = fabric.allocate(64)
            transfer = fabric.write(source, p.key, 0)
            1 / 0  # noqa: B018
    assert transfer.wait().bytes == 64


def test_how_it_is_not_opened() -> None:
    opening = blocking.open_fabric(engine_factory=FakeEngine)
    with opening, pytest.raises(RuntimeError, match="entered already"):
        opening.__enter__()
    with pytest.raises(TypeError, match="entered by `with`"):
        opening.__aenter__().send(None)  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="config must be"):
        blocking.open_fabric("local")  # type: ignore[arg-type]


def test_regions_of_other_faces_are_refused() -> None:
    with open_pair() as p:
        for call in (p.reader.write, p.reader.read_pages):
            with pytest.raises((TypeError, ValueError)):
                call(p.source, p.key, 0)  # type: ignore[operator]


@pytest.mark.parametrize(
    "call",
    [
        lambda p, counter, word: p.writer.rails,
        lambda p, counter, word: p.writer.statistics(),
        lambda p, counter, word: p.writer.take_trace(),
        lambda p, counter, word: p.writer.set_trace(True),
        lambda p, counter, word: p.writer.counter(),
        lambda p, counter, word: p.writer.write(p.source, p.key, 0),
        lambda p, counter, word: p.source.key(),
        lambda p, counter, word: counter.value,
        lambda p, counter, word: counter.wait(1),
        lambda p, counter, word: word.value,
        lambda p, counter, word: word.store(1),
    ],
)
def test_a_close_between_the_check_and_the_look_is_a_closed_error(call: Callable[..., Any]) -> None:
    """The engine is gone already, and the fabric does not know it: what a thread meets while another one closes."""
    pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
    with blocking.open_fabric() as fabric:
        source, counter = fabric.allocate(64), fabric.counter()
        p = SimpleNamespace(writer=fabric, source=source, key=source.key())
        word = fabric.watch().__enter__()
        fabric._dispatcher.engine.close()
        with pytest.raises(af.ClosedError):
            call(p, counter, word)
        fabric._dispatcher.closing = fabric._dispatcher.closed = True
        fabric._dispatcher.adapter.close()


def test_releasing_waits_for_what_uses_the_memory() -> None:
    with open_pair(hold=True) as p:
        buffer = bytearray(64)
        p.network.hold_control = False
        p.network.hold = False
        region = p.writer.register(buffer)
        p.network.hold = True
        transfer = p.writer.write(region, p.key, 0)
        releases = [Call(region.release) for _ in range(3)]
        until(lambda: region.released)
        with pytest.raises(BufferError):
            buffer.append(0)
        assert not any(release.ended for release in releases)
        p.network.deliver()
        for release in releases:
            release.result()
        buffer.append(0)
        assert transfer.wait().bytes == 64


def test_a_lost_peer_ends_the_wait_for_it() -> None:
    with open_pair() as p:
        peer = p.reader.connect(p.writer.address)
        counter = p.reader.counter()
        waiting, other = Call(counter.wait, 2, [peer]), p.reader.counter()
        blocked(p.reader, 1)
        goes_on = Call(other.wait, 1)
        blocked(p.reader, 2)
        p.writer.close()
        with pytest.raises(af.PeerError, match=f"{peer.incarnation:016x}"):
            waiting.result()
        p.reader.signal(p.reader.connect(p.reader.address), other.imm)
        assert goes_on.result() == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_child_of_a_fork_finds_it_closed(open_fabric: OpenFabric) -> None:
    """Also when another thread of the parent sleeps in a wait, or holds the lock, at that moment."""
    with open_fabric() as fabric:
        counter = fabric.counter()
        waiting = Call(counter.wait, 1)
        blocked(fabric, 1)
        with fabric._dispatcher.lock:
            holder = Call(fabric._dispatcher.drain)
        holder.result()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert fabric.why() == []
                fabric.close()
                fabric.counter()
            except af.ClosedError as error:
                status = 0 if "forked" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        fabric.signal(fabric.connect(fabric.address), counter.imm)
        assert waiting.result() == 1


def test_a_fabric_that_is_dropped_is_named() -> None:
    fabric = blocking.open_fabric(engine_factory=FakeEngine).__enter__()
    engine = fabric._dispatcher.engine
    with pytest.warns(ResourceWarning, match="never closed: leave its `with blocking"):
        del fabric
        gc.collect()
    engine.close()


def test_a_region_that_is_dropped_is_named() -> None:
    with open_pair() as p, pytest.warns(ResourceWarning, match=r"was dropped without `region.release\(\)`"):
        p.writer.allocate(64)
        gc.collect()


def test_a_program_that_only_takes_messages_leaves_few_completions_behind() -> None:
    pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
    with blocking.open_fabric() as writer, blocking.open_fabric() as reader:
        peer, messages = writer.connect(reader.address), reader.messages()
        for turn in range(1000):
            writer.send(peer, b"%d" % turn).wait(SOON_S)
            until(lambda: bool(messages.take_nowait()))
        assert len(reader._dispatcher.engine.poll(1000)) < 64


class SteppedEngine(FakeEngine):
    """A fake engine that is brought on by looks alone, as the compiled one with manual polling."""

    def assist(self) -> None:
        self.step()

    def look(self) -> bool:
        if not super().look():
            self.assist()
        return super().look()


def test_a_look_brings_a_transfer_on_although_completions_of_others_are_there() -> None:
    network = FakeNetwork()
    manual = af.FabricConfig(polling="manual")
    with (
        blocking.open_fabric(manual, engine_factory=lambda config: SteppedEngine(config, network)) as writer,
        blocking.open_fabric(engine_factory=lambda config: FakeEngine(config, network)) as reader,
    ):
        source, target = writer.allocate(64), reader.allocate(64)
        reader.send(reader.connect(writer.address), b"a message").wait()
        assert [payload for _, payload in writer.messages().take_nowait()] == [b"a message"]
        transfer = writer.write(source, target.key(), 0)
        _ = transfer.done  # takes the completion that announced the message
        assert transfer.has_ended

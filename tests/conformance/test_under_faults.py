"""Ring 4: what the engine makes of each fault that a rail can have, seen from Python over the fault provider."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest

import asyncfabric as af
from asyncfabric.testing.conformance.setting import left_to

MIB = 1 << 20
POISON = 0xA5


def _open(*rails: str, **options: Any) -> AbstractAsyncContextManager[af.Fabric]:
    return af.open_fabric(af.FabricConfig(rails=rails, **options))


@functools.cache
def _missing() -> str:
    async def attempt() -> None:
        async with _open("fault+local"):
            pass

    try:
        anyio.run(attempt, backend="trio")
    except af.DeviceError as error:
        return str(error)
    return ""


def _run(check: Callable[[], Awaitable[None]]) -> None:
    if reason := _missing():
        pytest.skip(f"fault+local cannot be opened here: {reason}")

    async def bounded() -> None:
        with anyio.fail_after(30):
            await check()

    anyio.run(bounded, backend="trio")


async def _target(fabric: af.Fabric, length: int) -> tuple[af.RegionKey, bytearray]:
    memory = bytearray([POISON]) * length
    region = left_to(fabric, await fabric.register(memory, access="write"))
    return af.RegionKey.from_bytes(bytes(region.key())), memory


def test_each_failed_request_fails_one_transfer() -> None:
    async def check() -> None:
        async with _open("fault+local?error_every=5") as writer, _open("fault+local") as target:
            key, memory = await _target(target, 100)
            region = left_to(writer, await writer.register(bytearray(b"\1" * 100), access="local"))
            counter = target.counter()
            failed = 0
            for number in range(50):
                try:
                    await writer.write(region[number : number + 1], key, number, imm=counter.imm)
                except af.TransferError:
                    failed += 1
                    assert memory[number] == POISON
            assert failed == 10
            assert await counter.wait(40) == 40
            assert memory.count(1) == 40

    _run(check)


def test_a_failed_piece_is_not_counted() -> None:
    """One of two rails fails a piece of a striped write: the write fails, and no count pretends that it arrived."""

    async def check() -> None:
        rails = ("fault+local?error_at=1&reorder=8", "fault+local?reorder=8")
        async with _open(*rails) as writer, _open("fault+local", "fault+local") as target:
            key, _ = await _target(target, MIB)
            region = left_to(writer, await writer.register(bytearray(MIB), access="local"))
            counter = target.counter()
            with pytest.raises(af.TransferError):
                await writer.write(region, key, 0, imm=counter.imm)
            await writer.write(region, key, 0, imm=counter.imm)
            assert await counter.wait(1) == 1

    _run(check)


def test_busy_rails_lose_nothing() -> None:
    async def check() -> None:
        async with _open("fault+local?busy_every=3") as writer, _open("fault+local") as target:
            key, _ = await _target(target, 4096)
            region = left_to(writer, await writer.register(bytearray(4096), access="local"))
            counter = target.counter()
            for _ in range(1000):
                writer.write(region, key, 0, imm=counter.imm)
            assert await counter.wait(1000) == 1000

    _run(check)


def test_a_rail_that_goes_down_is_left_out() -> None:
    """Later transfers go over the other rail; what was on the dead one ended, well or in error, never twice."""

    async def check() -> None:
        rails = ("fault+local?rail_down_at=20&delay_us=500", "fault+local?delay_us=500")
        async with _open(*rails) as writer, _open("fault+local", "fault+local") as target:
            key, memory = await _target(target, 200)
            region = left_to(writer, await writer.register(bytearray(b"\1" * 200), access="local"))
            counter = target.counter()
            transfers = [writer.write(region[i : i + 1], key, i, imm=counter.imm) for i in range(200)]
            good = 0
            for transfer in transfers:
                try:
                    await transfer
                    good += 1
                except (af.TransferError, af.DeviceError):
                    continue
            assert good >= 100
            await counter.wait(good)
            assert not writer.rails[0].up
            assert writer.rails[1].up
            result = await writer.write(region[0:1], key, 0, imm=counter.imm)
            assert result.rails == (1,)
            assert memory.count(1) >= good

    _run(check)


def test_a_device_that_hangs_quarantines_its_memory() -> None:
    """No flush, no answer: the await ends after the drain deadline, and release() refuses to give the memory up."""

    async def check() -> None:
        fabric = _open("fault+local?hang=3&flush=0", drain_deadline=0.3, peer_deadline_host=20.0)
        async with _open("fault+local") as target:
            key, _ = await _target(target, 4096)
            async with fabric as writer:
                region = left_to(writer, await writer.register(bytearray(4096), access="local"))
                counter = target.counter()
                for number in range(1, 3):
                    await writer.write(region, key, 0, imm=counter.imm)
                    await counter.wait(number)
                started = time.monotonic()
                with anyio.move_on_after(0.05) as scope:
                    await writer.write(region, key, 0)
                assert scope.cancelled_caught
                assert 0.3 <= time.monotonic() - started < 5
                assert writer.statistics().quarantined_regions == 1
                with pytest.raises(af.TransferError):
                    await region.release()

    _run(check)


def test_a_hanging_device_that_flushes_gives_the_memory_back() -> None:
    async def check() -> None:
        fabric = _open("fault+local?hang=1", drain_deadline=0.3, peer_deadline_host=20.0)
        async with _open("fault+local") as target, fabric as writer:
            key, _ = await _target(target, 4096)
            region = left_to(writer, await writer.register(bytearray(4096), access="local"))
            with anyio.move_on_after(0.05):
                await writer.write(region, key, 0)
            await region.release()
            assert writer.statistics().quarantined_regions == 0

    _run(check)


def test_refused_registrations_are_device_errors() -> None:
    async def check() -> None:
        async with _open("fault+local", "fault+local?refuse_register=2") as fabric:
            first = await fabric.register(bytearray(100))
            with pytest.raises(af.DeviceError):
                await fabric.register(bytearray(100))
            await (await fabric.register(bytearray(100))).release()
            await first.release()
            assert fabric.statistics().regions == 0

    _run(check)


def test_devices_without_immediates_are_refused_by_name() -> None:
    async def check() -> None:
        with pytest.raises(af.DeviceError, match="immediate"):
            async with _open("fault+local?no_immediates=1"):
                pass

    _run(check)


@pytest.mark.parametrize("lost", [2, 3])
def test_lost_handshake_messages_are_sent_again(lost: int) -> None:
    """The first message of each side, and then one in n, is lost: connecting takes longer and succeeds."""

    async def check() -> None:
        rails = [f"fault+local?harm_messages={lost}&seed={seed}" for seed in (2, 3)]
        async with _open(rails[0], connect_deadline=20.0) as writer, _open(rails[1]) as target:
            key, _ = await _target(target, 4096)
            region = left_to(writer, await writer.register(bytearray(4096), access="local"))
            counter = target.counter()
            peer = await writer.connect(target.address)
            await writer.write(region, key, 0, imm=counter.imm)
            await writer.signal(peer, counter.imm)
            assert await counter.wait(2) == 2

    _run(check)


def test_peers_that_never_answer_are_unreachable() -> None:
    async def check() -> None:
        async with _open("fault+local?harm_messages=1", connect_deadline=0.5) as writer, _open("fault+local") as target:
            started = time.monotonic()
            with pytest.raises(af.PeerError):
                await writer.connect(target.address)
            assert time.monotonic() - started < 5

    _run(check)


def test_slow_readers_slow_their_writers_and_lose_nothing() -> None:
    async def check() -> None:
        # Answers to heartbeats stand behind all the signals, long enough to be called dead.
        patient = _open("fault+local", peer_deadline_host=20.0)
        async with patient as writer, _open("fault+local?slow_reader_us=200") as target:
            peer = await writer.connect(target.address)
            counter = target.counter()
            for _ in range(3000):
                writer.signal(peer, counter.imm)
            assert await counter.wait(3000) == 3000

    _run(check)

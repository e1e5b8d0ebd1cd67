"""Checks of keys and bounds (INV-3): a key reaches what it names while it is alive, hostile bytes reach nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

import asyncfabric as af
from asyncfabric.testing.conformance.setting import (
    MIB,
    POISON,
    SCORCH,
    FabricFactory,
    Pair,
    assert_bytes,
    assert_untouched,
    carried_address,
    carried_key,
    memory_of,
    open_pair,
    view_of,
)

REFUSALS = (af.StaleKeyError, af.TransferError, af.PeerError, af.ClosedError, ValueError)


async def _fails_stale(pair: Pair, region: Any, key: Any, what: str) -> None:
    counter = pair.target.counter()
    try:
        await pair.writer.write(region, key, 0, imm=counter.imm)
    except (af.StaleKeyError, af.PeerError):
        assert counter.value == 0
    except af.TransferError as error:
        raise AssertionError(f"{what} was refused without stating that it is stale") from error
    else:
        raise AssertionError(f"{what} was written with")


async def check_revoked_keys(factory: FabricFactory) -> None:
    """After `revoke()` returned every older key is dead, on every rail, and the next key works."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(300_000)
        exposed, memory = await pair.poisoned(300_000)
        counter = pair.target.counter()
        old = []
        for generation in range(1, 4):
            old.append(carried_key(exposed))
            await pair.writer.write(region, old[-1], 0, imm=counter.imm)
            assert await counter.wait(generation) == generation
            await exposed.revoke()
            memory[:] = bytes([POISON]) * len(memory)
            for key in old:
                await _fails_stale(pair, region, key, "a revoked key")
                await _fails_stale(pair, region[0:16], key, "a revoked key")
            assert_untouched(memory, "writes with revoked keys")
        await pair.writer.write(region, carried_key(exposed), 0, imm=counter.imm)
        assert await counter.wait(4) == 4
        assert_bytes(memory, content, "after revocation")


async def check_a_key_that_comes_after_a_loss_connects_again(factory: FabricFactory) -> None:
    """Who dropped the connection and sends a new key is alive: the key leads to it, and what it counts is counted."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(50_000)
        exposed, memory = await pair.poisoned(50_000)
        await pair.writer.write(region, carried_key(exposed), 0)
        for _ in range(2):
            peer = await pair.target.connect(carried_address(pair.writer))
            await pair.target.disconnect(peer)
            memory[:] = bytes([POISON]) * len(memory)
            with anyio.fail_after(10):
                while True:
                    counter = pair.target.counter()  # a try that fails may have arrived: each has its own
                    try:
                        await pair.writer.write(region, carried_key(exposed), 0, imm=counter.imm)
                        break
                    except af.FabricError:  # the news of the loss were still on their way
                        counter.close()
                        await anyio.sleep(0.01)
            assert await counter.wait(1) == 1
            assert_bytes(memory, content, "with a key that came after the loss")
            await exposed.revoke()


async def check_revoke_under_fire(factory: FabricFactory) -> None:
    """Writes in flight while the key is revoked: none lands after `revoke()` returned."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(MIB)
        exposed, memory = await pair.poisoned(32 * MIB)
        await pair.peer()
        for _ in range(3):
            key = carried_key(exposed)
            transfers = [pair.writer.write(region, key, number * MIB) for number in range(32)]
            await exposed.revoke()
            memory[:] = bytes([SCORCH]) * len(memory)
            for transfer in transfers:
                try:
                    await transfer
                except (af.StaleKeyError, af.TransferError):
                    continue
            assert bytes(memory) == bytes([SCORCH]) * len(memory), "written after revoke() returned"


async def check_releases_of_two_fabrics_at_once(factory: FabricFactory) -> None:
    """Two fabrics that wrote to each other release at once, again and again: neither waits for the other's rails."""
    rounds = 12

    async def release(fabric: af.Fabric) -> None:
        for number in range(rounds):
            region = await memory_of(factory, fabric, 64, "read-write")
            if number % 2:
                await region.revoke()
            await region.release()

    async with open_pair(factory) as pair:
        for writer, target in ((pair.writer, pair.target), (pair.target, pair.writer)):
            exposed = await memory_of(factory, target, 64, "read-write")
            source = await memory_of(factory, writer, 64, "local")
            await writer.write(source, carried_key(exposed), 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release, pair.writer)
            tasks.start_soon(release, pair.target)
        assert not pair.writer.statistics().quarantined_regions + pair.target.statistics().quarantined_regions


async def check_keys_of_a_released_region(factory: FabricFactory) -> None:
    """A key outlives its region harmlessly, also when the next region takes its place."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(50_000)
        exposed, _ = await pair.poisoned(50_000)
        key = carried_key(exposed)
        await pair.writer.write(region, key, 0)
        await exposed.release()
        following, memory = await pair.poisoned(50_000)
        await _fails_stale(pair, region, key, "a key of a released region")
        assert_untouched(memory, "the next region")
        await pair.writer.write(region, carried_key(following), 0)


async def check_keys_of_an_earlier_incarnation(factory: FabricFactory) -> None:
    """A fabric that was closed and opened again is another peer: its old keys touch nothing."""
    async with factory.open() as writer:
        region = await memory_of(factory, writer, 4096, "local")
        async with factory.target() as target:
            exposed = await memory_of(factory, target, 4096, "read-write")
            key = carried_key(exposed)
            await writer.write(region, key, 0)
            address = bytes(target.address)
        async with factory.target() as target:
            assert bytes(target.address) != address, "an incarnation is random"
            exposed = await memory_of(factory, target, 4096, "read-write")
            memory = view_of(exposed)
            memory[:] = bytes([POISON]) * 4096
            try:
                await writer.write(region, key, 0)
            except (af.StaleKeyError, af.PeerError):
                assert_untouched(memory, "the next incarnation")
            else:
                raise AssertionError("a key of an earlier incarnation was written with")
            await writer.write(region, carried_key(exposed), 0)


async def check_rights(factory: FabricFactory) -> None:
    """A key carries no right that was not asked for, and cannot ask for more than its region gives."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(4096)
        exposed, memory = await pair.poisoned(4096)
        reading = carried_key(exposed, access="read")
        _refused(lambda: pair.writer.write(region, reading, 0), "a write with a read key")
        _refused(
            lambda: pair.writer.write_pages(region, [0], reading, [0], page_bytes=8, source_stride=8, target_stride=8)
        )
        writing = carried_key(exposed, access="write")
        _refused(lambda: pair.writer.read(writing, 0, region), "a read with a write key")
        assert_untouched(memory, "refused writes")
        await pair.writer.write(region, writing, 0)
        local = await pair.target.register(bytearray(64), access="local")
        _refused(lambda: local.key(access="write"), "a remote key of local memory")


async def check_strict_keys(factory: FabricFactory) -> None:
    """A strict key carries bytes both ways within its range, on every rail, and ends with a revocation."""
    async with open_pair(factory) as pair:
        region, content = await pair.source(4096)
        exposed, memory = await pair.poisoned(8192)
        try:
            key = carried_key(exposed[100:4196], strict=True)
        except af.TransferError:
            return  # memory that no rail can hold a peer to a range of
        counter = pair.target.counter()
        await pair.writer.write(region, key, 0, imm=counter.imm)
        await pair.writer.write(region[0:8], key, 4088, imm=counter.imm)
        assert await counter.wait(2) == 2
        assert_bytes(memory[100:4188], content[:4088], "a strict key's range")
        assert_untouched(memory[:100], "before a strict key's range")
        assert_untouched(memory[4196:], "behind a strict key's range")
        _refused(lambda: pair.writer.write(region[0:8], key, 4089), "a write beyond a strict key")
        await exposed.revoke()
        await _fails_stale(pair, region[0:8], key, "a revoked strict key")


async def check_bounds(factory: FabricFactory) -> None:
    """Each misuse raises at the call, names the value or the bound, and leaves the fabric usable."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(8192)
        exposed, memory = await pair.poisoned(4096)
        key = carried_key(exposed)
        write: Any = pair.writer.write  # what the type checker would refuse has to be refused at run time too
        signal: Any = pair.writer.signal
        for call in (
            lambda: write(region[0:4097], key, 0),
            lambda: write(region[0:1], key, 4096),
            lambda: write(region[0:4096], key, 1),
            lambda: write(region[0:1], key, -1),
            lambda: write(region[0:1], key, 1 << 64),
            lambda: write(region[0:1], key, 0.5),
            lambda: write(region[0:1], key, None),
            lambda: write(region[0:1], b"key", 0),
            lambda: write(bytearray(4), key, 0),
            lambda: write(region[0:1], key, 0, imm=1.5),
            lambda: write(region[0:1], key, 0, imm="1"),
            lambda: signal(None, 1),
        ):
            _refused(call)
        assert_untouched(memory, "refused writes")
        await write(region[4096:8192], key, 0)
        await write(region[0:0], key, 4096)


async def check_bad_buffers(factory: FabricFactory) -> None:
    """Buffers that cannot be registered raise: read-only for a remote writer, not contiguous, not a buffer."""
    async with factory.open() as fabric:
        for buffer in (memoryview(bytearray(100))[::2], "text", 17, None, [1, 2, 3]):
            try:
                await fabric.register(buffer)
            except (TypeError, ValueError):
                continue
            raise AssertionError(f"{buffer!r} was registered")
        try:
            await fabric.register(b"frozen", access="write")
        except (TypeError, ValueError):
            pass
        else:
            raise AssertionError("read-only memory was opened to remote writers")
        for length in (-1, 0.5, "1", 1 << 63):
            try:
                await fabric.allocate(length)  # type: ignore[arg-type]
            except (TypeError, ValueError, OverflowError, af.DeviceError):
                continue
            raise AssertionError(f"{length!r} bytes were allocated")
        await (await fabric.register(bytearray(100))).release()


async def check_hostile_keys(factory: FabricFactory) -> None:
    """Bytes that are no key are refused; bytes that still look like one touch nothing outside the region it names."""
    async with open_pair(factory) as pair:
        region, _ = await pair.source(64)
        exposed, memory = await pair.poisoned(64)
        neighbour, neighbour_memory = await pair.poisoned(64)
        good = bytes(exposed.key())
        assert len(good) <= 4096
        for data in _mutations(pair, good):
            try:
                key = af.RegionKey.from_bytes(data)
                await pair.writer.write(region, key, 0)
            except REFUSALS:
                continue
        assert_untouched(neighbour_memory, "another region")
        memory[:] = bytes([POISON]) * 64
        await pair.writer.write(region[0:32], carried_key(exposed), 0)
        assert_untouched(memory[32:], "beyond the write")
        assert neighbour is not None


async def check_hostile_addresses(factory: FabricFactory) -> None:
    """Bytes that are no address are refused; a good address with a flipped bit connects to nobody else's memory."""
    async with open_pair(factory) as pair:
        good = bytes(pair.target.address)
        assert len(good) <= 4096
        refused = 0
        for data in (*_truncations(good), good + b"\0", bytes(5000), pair.chance.randbytes(64), good[::-1]):
            try:
                af.FabricAddress.from_bytes(data)
            except (ValueError, af.FabricError):
                refused += 1
                continue
            raise AssertionError(f"{len(data)} bytes were taken for an address")
        assert refused > 8
        peer = await pair.peer()
        counter = pair.target.counter()
        await pair.writer.signal(peer, counter.imm)
        assert await counter.wait(1) == 1
        assert bytes(carried_address(pair.target)) == good


def _truncations(good: bytes) -> list[bytes]:
    cuts = {0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, len(good) // 2, len(good) - 1}
    return [good[:cut] for cut in sorted(cuts) if cut < len(good)]


def _mutations(pair: Pair, good: bytes) -> list[bytes]:
    """Return truncations, extensions, noise, and the good bytes with single bits flipped or whole bytes changed."""
    found = [*_truncations(good), good + b"\0", good * 2, bytes(len(good)), b"\xff" * len(good), bytes(100_000)]
    found += [pair.chance.randbytes(len(good)) for _ in range(20)]
    for _ in range(40):
        position = pair.chance.randrange(len(good))
        flipped = bytearray(good)
        flipped[position] ^= 1 << pair.chance.randrange(8)
        found.append(bytes(flipped))
    for position in range(0, len(good), max(1, len(good) // 24)):
        changed = bytearray(good)
        changed[position : position + 8] = b"\xff" * len(changed[position : position + 8])
        found.append(bytes(changed))
    return [data for data in found if data != good]


def _refused(call: Callable[[], Any], what: str = "a bad argument") -> None:
    try:
        call()
    except (ValueError, TypeError, OverflowError):
        return
    raise AssertionError(f"{what} was taken")

"""Writes that a watch word sets off: the worker posts them when the word is there, no event loop in between."""

from __future__ import annotations

import ctypes

import anyio
import pytest

import asyncfabric as af

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
pytestmark = pytest.mark.anyio

CONFIG = af.FabricConfig(rails=("local",))
PAGE = 4096
PATIENCE_S = 60


async def test_each_write_leaves_at_its_own_value_of_the_word() -> None:
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target, writer.watch() as word:
        source, exposed = await writer.allocate(8 * PAGE), await target.allocate(8 * PAGE)
        counter = target.counter()
        key = exposed.key()
        await writer.write(source[:1], key, 0)
        memoryview(source)[:] = b"".join(bytes([layer]) * PAGE for layer in range(8))
        transfers = [
            writer.write(
                source[layer * PAGE : (layer + 1) * PAGE], key, layer * PAGE, imm=counter.imm, after=word.reaches(layer)
            )
            for layer in range(1, 8)
        ]
        with anyio.fail_after(PATIENCE_S):
            for layer in range(1, 8):
                ctypes.c_uint64.from_address(word.address).value = layer  # as a kernel does: nothing is woken
                await transfers[layer - 1]
                await counter.wait(layer)
                assert bytes(exposed.memory[layer * PAGE : (layer + 1) * PAGE]) == bytes([layer]) * PAGE
                assert not any(transfer.done for transfer in transfers[layer:]), "a write left before its value"
                assert bytes(exposed.memory[(layer + 1) * PAGE :]).strip(b"\0") == b""


async def test_a_word_that_is_there_already_holds_nothing_up() -> None:
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target, writer.watch() as word:
        source, exposed = await writer.allocate(8 * PAGE), await target.allocate(8 * PAGE)
        word.store(9)
        with anyio.fail_after(PATIENCE_S):
            pages = list(range(8))
            await writer.write_pages(source, pages, exposed.key(), pages, page_bytes=PAGE, after=word.reaches(3))


async def test_a_cancelled_write_sends_nothing_when_the_word_comes() -> None:
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target, writer.watch() as word:
        source, exposed = await writer.allocate(PAGE), await target.allocate(PAGE)
        key = exposed.key()
        await writer.write(source, key, 0)
        memoryview(source)[:] = b"x" * PAGE
        transfer = writer.write(source, key, 0, after=word.reaches(1))
        with anyio.move_on_after(0.01) as scope:
            await transfer
        assert scope.cancelled_caught
        word.store(1)
        with anyio.fail_after(PATIENCE_S):
            counter = target.counter()
            await writer.write(source[:0], key, 0, imm=counter.imm)
            await counter.wait(1)
        assert bytes(exposed.memory) == bytes(PAGE)


async def test_a_word_that_is_closed_first_ends_the_write() -> None:
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target:
        source, exposed = await writer.allocate(PAGE), await target.allocate(PAGE)
        key = exposed.key()
        await writer.write(source, key, 0)
        async with writer.watch() as word:
            moment = word.reaches(1)
            transfer = writer.write(source, key, 0, after=moment)
        with anyio.fail_after(PATIENCE_S), pytest.raises(af.ClosedError):
            await transfer
        with pytest.raises(af.ClosedError):
            writer.write(source, key, 0, after=moment)


async def test_a_word_of_another_fabric_is_refused() -> None:
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target, target.watch() as word:
        source, exposed = await writer.allocate(PAGE), await target.allocate(PAGE)
        with pytest.raises(ValueError, match="of another fabric"):
            writer.write(source, exposed.key(), 0, after=word.reaches(1))
        with pytest.raises(ValueError, match="-1"):
            word.reaches(-1)


async def test_a_fabric_that_is_cancelled_does_not_wait_for_a_word() -> None:
    async with af.open_fabric(CONFIG) as target:
        exposed = await target.allocate(PAGE)
        with anyio.fail_after(PATIENCE_S), anyio.CancelScope() as scope:
            async with af.open_fabric(CONFIG) as writer:
                source = await writer.allocate(PAGE)
                await writer.write(source, exposed.key(), 0)
                word = await writer.watch().__aenter__()
                transfer = writer.write(source, exposed.key(), 0, after=word.reaches(1))
                scope.cancel()
        with pytest.raises(af.TransferError, match="0 of 4096 bytes had left"):
            await transfer

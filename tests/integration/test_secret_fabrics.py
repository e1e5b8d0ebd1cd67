"""Fabrics with a secret as programs use them: peers with the same one work together, others get an error at once.

What a stranger without the secret can reach is tested from its side in `native/tests/engine/engine_secret_test.cc`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

import asyncfabric as af

OURS = b"only for peers of ours"
THEIRS = b"somebody else's secret"
RAILS = ("local", "tcp:lo")

pytestmark = pytest.mark.parametrize("rail", RAILS)


def config(rail: str, secret: bytes | Path | None) -> af.FabricConfig:
    """Return the configuration of one of the two fabrics."""
    return af.FabricConfig(rails=(rail,), secret=secret, connect_deadline=30.0)


def run(work: Callable[..., object], *arguments: object) -> None:
    """Run a test's coroutine, for 30 s at most."""

    async def bounded() -> None:
        with trio.fail_after(30):
            await work(*arguments)  # type: ignore[misc]

    trio.run(bounded)


async def exchange(writer: af.Fabric, reader: af.Fabric) -> None:
    """Write, count and send in both directions."""
    for source, target in ((writer, reader), (reader, writer)):
        mine, theirs = await source.allocate(8192), await target.allocate(8192)
        memoryview(mine)[:] = bytes(range(256)) * 32
        counter = target.counter()
        await source.write(mine[0:8192], theirs.key(), 0, imm=counter.imm)
        await counter.wait(1)
        assert counter.value == 1
        assert bytes(memoryview(theirs)) == bytes(memoryview(mine))
        await source.send(await source.connect(target.address), b"from a peer")
        async for message in target.messages():
            assert bytes(message.payload) == b"from a peer"
            break
        counter.close()
        await mine.release()
        await theirs.release()


def test_peers_with_the_same_secret_work_together(rail: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(OURS)

    async def work() -> None:
        async with af.open_fabric(config(rail, OURS)) as one, af.open_fabric(config(rail, path)) as other:
            await exchange(one, other)
            assert [found.admission for found in one.rails] == ["secret"]

    run(work)


def test_without_a_secret_rails_are_open(rail: str) -> None:
    async def work() -> None:
        async with af.open_fabric(config(rail, None)) as one, af.open_fabric(config(rail, None)) as other:
            await exchange(one, other)
            assert [found.admission for found in one.rails] == ["open"]

    run(work)


@pytest.mark.parametrize(("ours", "theirs"), [(OURS, THEIRS), (OURS, None), (None, OURS)])
def test_another_secret_is_an_error_at_once(rail: str, ours: bytes | None, theirs: bytes | None) -> None:
    async def work() -> None:
        async with af.open_fabric(config(rail, ours)) as one, af.open_fabric(config(rail, theirs)) as other:
            began = time.monotonic()
            with pytest.raises(af.PeerError, match="secret") as caught:
                await one.connect(other.address)
            assert time.monotonic() - began < 10, "the deadline is 30 s"
            text = str(caught.value)
            assert f"{one.address.incarnation:x}" not in text and f"{other.address.incarnation:x}" in text
            for secret in (OURS, THEIRS):
                assert secret.decode() not in text and secret.hex() not in text
            source, target = await one.allocate(64), await other.allocate(64)
            before = bytes(memoryview(target))
            with pytest.raises(af.PeerError):
                await one.write(source[0:64], target.key(), 0)
            assert bytes(memoryview(target)) == before
            await source.release()
            await target.release()

    run(work)


def test_a_file_of_a_wrong_length_is_refused(rail: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"short")

    async def work() -> None:
        with pytest.raises(ValueError, match=r"must have 16\.\.4096 bytes, it has 5"):
            async with af.open_fabric(config(rail, path)):
                pass

    run(work)

"""Bad arguments raise at the call, with the value and the bound in the text, and leave nothing in flight."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from fabrics import LENGTH, Pair, open_fake, open_pair

import asyncfabric as af
from asyncfabric.testing import FakeNetwork

pytestmark = pytest.mark.anyio

REFUSED: list[tuple[str, type[Exception], str, Callable[[Pair], Any]]] = [
    (
        "remote end",
        ValueError,
        f"offset {LENGTH - 3} .* {LENGTH + 1} ",
        lambda p: p.writer.write(p.source[:4], p.key, LENGTH - 3),
    ),
    ("remote negative", ValueError, "offset must be >= 0, got -1", lambda p: p.writer.write(p.source[:4], p.key, -1)),
    ("float offset", TypeError, "float 1.0", lambda p: p.writer.write(p.source[:4], p.key, 1.0)),
    ("bool offset", TypeError, "bool True", lambda p: p.writer.write(p.source[:4], p.key, True)),
    ("no offset", TypeError, "NoneType", lambda p: p.writer.write(p.source[:4], p.key, None)),
    ("local end", ValueError, rf"slice \[0:{LENGTH + 1}\]", lambda p: p.source[: LENGTH + 1]),
    ("local negative", ValueError, "slice start must be >= 0, got -1", lambda p: p.source[-1:]),
    ("slice backwards", ValueError, r"slice \[5:4\]", lambda p: p.source[5:4]),
    ("slice step", ValueError, "no step, got 2", lambda p: p.source[::2]),
    ("slice index", TypeError, "sliced as", lambda p: p.source[3]),
    ("slice of slice", ValueError, "slice of 4 bytes", lambda p: p.source[:4][2:5]),
    (
        "imm negative",
        ValueError,
        "imm must be in 0..1048575, got -1",
        lambda p: p.writer.write(p.source, p.key, 0, imm=-1),
    ),
    ("imm large", ValueError, "got 1048576", lambda p: p.writer.write(p.source, p.key, 0, imm=1 << 20)),
    ("imm bool", TypeError, "bool", lambda p: p.writer.write(p.source, p.key, 0, imm=False)),
    ("not a region", TypeError, "bytes; register", lambda p: p.writer.write(b"abc", p.key, 0)),
    ("not a key", TypeError, "RegionKey.from_bytes", lambda p: p.writer.write(p.source, bytes(p.key), 0)),
    ("no write right", ValueError, "no right to write", lambda p: p.writer.write(p.source, p.target.key("read"), 0)),
    ("no read right", ValueError, "no right to read", lambda p: p.writer.read(p.target.key("write"), 0, p.source)),
    ("read beyond", ValueError, "beyond the", lambda p: p.writer.read(p.target[:8].key(), 1, p.source[:8])),
    ("foreign region", ValueError, "another fabric", lambda p: p.writer.write(p.target, p.key, 0)),
    ("page beyond source", ValueError, r"source_pages\[1\] = 16 leaves", lambda p: pages(p, [0, 16], [0, 1])),
    ("page beyond target", ValueError, r"target_pages\[0\] = 16 leaves", lambda p: pages(p, [0, 1], [16, 1])),
    ("page negative", ValueError, r"source_pages\[1\] = -1 leaves", lambda p: pages(p, [0, -1], [0, 1])),
    ("page counts", ValueError, "2 source pages, but 1 target", lambda p: pages(p, [0, 1], [0])),
    ("page floats", TypeError, "float", lambda p: pages(p, np.array([0.5]), [0])),
    ("page float in list", TypeError, r"source_pages\[1\].*float", lambda p: pages(p, [0, 1.0], [0, 1])),
    ("page bool in list", TypeError, r"target_pages\[0\].*bool", lambda p: pages(p, [0], [True])),
    ("page matrix", ValueError, "one dimension", lambda p: pages(p, np.zeros((2, 2), int), [0])),
    ("page huge", ValueError, "beyond 64 bits", lambda p: pages(p, [1 << 64], [0])),
    ("page overflowing", ValueError, "source_pages", lambda p: pages(p, [(1 << 62)], [0])),
    ("page text", TypeError, "str", lambda p: pages(p, "01", [0, 1])),
    ("page bytes zero", ValueError, "page_bytes must be >= 1, got 0", lambda p: pages(p, [0], [0], page_bytes=0)),
    ("page of slice", ValueError, "RegionSlice", lambda p: pages(p, [1], [0], source=p.source[:4096])),
    ("scatter nothing", TypeError, "list of ScatterTarget, got NoneType", lambda p: p.writer.scatter(p.source, None)),
    ("scatter row", TypeError, r"targets\[1\] must be", lambda p: p.writer.scatter(p.source, [target(p), 3])),
    (
        "scatter source",
        ValueError,
        r"targets\[0\].source_offset",
        lambda p: p.writer.scatter(p.source, [target(p, LENGTH)]),
    ),
    (
        "scatter offset",
        ValueError,
        r"targets\[0\].offset .* is beyond the",
        lambda p: p.writer.scatter(p.source, [target(p)._replace(offset=LENGTH)]),
    ),
    (
        "scatter length",
        ValueError,
        r"length_bytes must be >= 0, got -1",
        lambda p: p.writer.scatter(p.source, [target(p, 0, -1)]),
    ),
    ("signal to address", TypeError, "FabricAddress", lambda p: p.writer.signal(p.reader.address, 1)),
    ("signal without imm", TypeError, "NoneType", lambda p: p.writer.signal(only_peer(p), None)),
    ("barrier of list", TypeError, "PeerGroup", lambda p: p.writer.barrier([only_peer(p)], 1)),
    ("group of ints", TypeError, "int 1", lambda p: af.PeerGroup([1])),
    ("send text", TypeError, "str", lambda p: p.writer.send(only_peer(p), "text")),
    ("send much", ValueError, "8193 bytes", lambda p: p.writer.send(only_peer(p), bytes(8193))),
    ("key with more rights", ValueError, "registered", lambda p: p.source.key("everything")),
    ("key of nothing", ValueError, "empty slice", lambda p: p.source[3:3].key()),
    ("counter float", TypeError, "float", lambda p: p.writer.counter(1.5)),
    ("config", TypeError, "FabricConfig", lambda p: af.open_fabric({"rails": ()})),
]


def pages(p: Pair, sources: Any, targets: Any, *, source: Any = None, page_bytes: Any = 4096) -> af.Transfer:
    return p.writer.write_pages(source or p.source, sources, p.key, targets, page_bytes=page_bytes)


def target(p: Pair, source_offset: int = 0, length: int = 8) -> af.ScatterTarget:
    return af.ScatterTarget(p.key, source_offset, 0, length)


def only_peer(p: Pair) -> af.Peer:
    return p.writer._peers.by_id(p.writer.statistics().peers[0].id)


@pytest.mark.parametrize(("error", "states", "call"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
async def test_bad_arguments_are_refused_at_the_call(
    error: type[Exception], states: str, call: Callable[[Pair], Any]
) -> None:
    async with open_pair() as p:
        with pytest.raises(error, match=states if states != "registered" else "access must be"):
            call(p)
        assert p.writer.statistics().ops_submitted == 0
        assert p.writer.why() == []
        await p.writer.write(p.source[:8], p.key, 0)


AWAITED: list[tuple[str, type[Exception], str, Callable[[Pair], Any]]] = [
    (
        "length of no machine",
        ValueError,
        "length_bytes .* got 1180591620717411303424",
        lambda p: p.writer.allocate(1 << 70),
    ),
    ("warm one address", TypeError, "list of addresses", lambda p: p.writer.warm(p.reader.address)),  # type: ignore[arg-type]
    ("wait beyond 63 bits", ValueError, "target must be", lambda p: p.writer.counter().wait(1 << 63)),
    ("wait for one peer", TypeError, "list of Peer", lambda p: p.writer.counter().wait(1, peers=only_peer(p))),  # type: ignore[arg-type]
    ("wait for a stranger", ValueError, "another fabric", lambda p: p.reader.counter().wait(1, peers=[only_peer(p)])),
    ("wait for one transfer", TypeError, "takes a list", lambda p: af.wait_all(p.writer.write(p.source[:4], p.key, 0))),  # type: ignore[arg-type]
    ("wait for no transfer", TypeError, "int 1", lambda p: af.wait_all([1])),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("error", "states", "call"), [row[1:] for row in AWAITED], ids=[row[0] for row in AWAITED])
async def test_bad_arguments_of_what_is_awaited(
    error: type[Exception], states: str, call: Callable[[Pair], Any]
) -> None:
    async with open_pair() as p:
        with pytest.raises(error, match=states):
            await call(p)
        assert p.writer.why() == p.reader.why() == []


async def test_strides_beyond_64_bits_are_refused_by_name() -> None:
    async with open_pair() as p:
        for name in ("page_bytes", "source_stride", "target_stride", "source_offset", "target_offset"):
            shape = {"page_bytes": 4, name: 1 << 70}
            with pytest.raises(ValueError, match=f"{name} must be in"):
                p.writer.write_pages(p.source, [0], p.key, [0], **shape)


async def test_a_key_in_use_is_copied_as_its_bytes() -> None:
    """By copy and by pickle, which multiprocessing uses: what an engine knows of the key stays behind."""
    async with open_pair() as p:
        await p.writer.write(p.source[:8], p.key, 0)
        for twin in (copy.deepcopy(p.key), pickle.loads(pickle.dumps(p.key))):
            assert twin == p.key
            await p.writer.write(p.source[:8], twin, 0)


async def test_a_fabric_is_opened_by_async_with_alone() -> None:
    opening = open_fake(FakeNetwork())
    with pytest.raises(TypeError, match="by `async with open_fabric"), opening:
        pass
    with pytest.raises(TypeError, match="by `async with open_fabric"):
        await opening


async def test_who_waits_in_another_loop_gets_an_error() -> None:
    """In a thread with a loop of its own, of either kind, while the fabric's loop runs on."""

    async def wait(counter: af.ImmCounter) -> None:
        await counter.wait(1)

    async with open_pair() as p:
        with p.reader.counter() as counter:
            for backend in ("trio", "asyncio"):
                with pytest.raises(RuntimeError, match="the thread that opened it"):
                    await anyio.to_thread.run_sync(partial(anyio.run, wait, counter, backend=backend))
            await p.writer.signal(only_peer(p), counter.imm)
            assert await counter.wait(1) == 1


async def test_numpy_integers_are_integers() -> None:
    async with open_pair() as p:
        await p.writer.write(p.source[np.int64(2) : np.uint8(6)], p.key, np.int32(3), imm=np.uint16(9))
        assert bytes(p.target.memory[3:7]) == bytes(p.source.memory[2:6])
        with p.reader.counter(np.int64(9)) as counter:
            assert await counter.wait(np.int8(1)) == 1


async def test_rights_cannot_be_widened() -> None:
    async with open_pair() as p:
        local = await p.reader.allocate(64, access="local")
        readable = await p.reader.allocate(64, access="read")
        with pytest.raises(ValueError, match="registered with 'read'"):
            readable.key("read-write")
        with pytest.raises(ValueError, match="access='local'"):
            local.key()
        assert readable.key().access == "read"


async def test_a_frame_that_disagrees_with_its_engine_bytes_is_damaged() -> None:
    async with open_pair() as p:
        forged = bytearray(bytes(p.target[:8].key("read")))
        forged[5] = 3  # the access byte of the frame
        with pytest.raises(ValueError, match="damaged"):
            p.writer.write(p.source[:8], af.RegionKey.from_bytes(forged), 0)
        with pytest.raises(ValueError, match="damaged"):
            address = p.reader.address
            await p.writer.connect(af.FabricAddress(address.incarnation + 1, address.engine_bytes))


async def test_gpu_memory_states_what_is_missing() -> None:
    async with open_fake(FakeNetwork()) as fabric:
        for device in ("cuda:0", "cuda", 0):
            with pytest.raises((af.DeviceError, ValueError)):
                await fabric.allocate(4096, device=device)
        with pytest.raises(af.DeviceError, match="rail of that GPU"):
            await fabric.allocate(4096, device="cuda:1")
        for device in ("cuda:", "gpu", "cuda:x", "cpu:0"):
            with pytest.raises(ValueError, match="device must be"):
                await fabric.allocate(4096, device=device)
        for length in (0, -1):
            with pytest.raises(ValueError, match="length_bytes must be >= 1"):
                await fabric.allocate(length)

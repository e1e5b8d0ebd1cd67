"""The contract of a directory's store, over each store there is: memory, torch.distributed's server, a real etcd."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import etcd
import pytest
import trio

from asyncfabric import BrokenError
from asyncfabric.control.directory import Decision
from asyncfabric.control.messages import Identity
from asyncfabric.control.stores import DirectoryStore, MemoryStore, SharedTable, StoreAddress, open_store

PATIENCE_S = 20.0
OpenStore = Callable[[], AbstractAsyncContextManager[DirectoryStore]]


@pytest.fixture(scope="module", autouse=True)
def served_once() -> None:
    """Have torch make what it keeps for the life of the process: the pipe of libuv's signals."""
    if find_spec("torch") is not None:
        serve_torch(0)


def serve_torch(port: int) -> Any:
    """Return a store that serves others as long as it is held."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


@pytest.fixture(params=["memory", "torch", "etcd"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Return a function that opens one more client of a store."""
    if request.param == "etcd":
        server = etcd.Etcd(tmp_path)
        yield lambda: open_store(server.address)
        server.kill()
    elif request.param == "torch":
        pytest.importorskip("torch")
        master = serve_torch(0)
        yield lambda: open_store(f"torch://127.0.0.1:{master.port}/test")
        del master
        gc.collect()
    else:
        store = MemoryStore()

        @asynccontextmanager
        async def same() -> AsyncIterator[DirectoryStore]:
            yield store

        yield same


@pytest.mark.trio
async def test_one_creates_and_all_see_it(opened: OpenStore) -> None:
    with trio.fail_after(PATIENCE_S):
        async with opened() as one, opened() as other:
            won: list[DirectoryStore] = []

            async def create(store: DirectoryStore) -> None:
                for number in range(10):
                    if await store.create(f"key/{number}", b"\x00\xff"):  # the same value of both: one of them wins
                        won.append(store)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(create, one)
                nursery.start_soon(create, other)
            assert len(won) == 10
            assert await one.get("key/3") == await other.get("key/3") == b"\x00\xff"
            await other.put("key/3", b"")
            assert await one.get("key/3") == b"" and await one.get("key/11") is None
            await one.delete([f"key/{number}" for number in range(1, 10)])
            assert await other.get("key/3") is None and await other.get("key/0") == b"\x00\xff"
            assert await other.create("key/3", b"again") and not await one.create("key/3", b"again")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(until_there, one, "late")
                await trio.sleep(0.1)
                await other.put("late", b"now")


async def until_there(store: DirectoryStore, key: str) -> None:
    while await store.get(key) is None:
        await store.wait(key)


@pytest.mark.trio
async def test_two_directories_that_decide_at_once_have_one_table(opened: OpenStore) -> None:
    with trio.fail_after(PATIENCE_S):
        async with opened() as first, opened() as second, trio.open_nursery() as nursery:
            epochs: list[list[int]] = [[], []]
            tables = []
            for number, store in enumerate((first, second)):

                def applied(decision: Decision, seen: list[int] = epochs[number]) -> None:
                    seen.extend(change.epoch for change in decision.changes)

                me = Identity(f"d{number}", 1)
                shared = SharedTable(store, me, 10**10, b"s" * 32, applied=applied, begun=lambda: None)
                await shared.open()
                nursery.start_soon(shared.follow)
                tables.append(shared)

            async def register(shared: SharedTable, key: str) -> None:
                for number in range(20):
                    who = Identity(f"n{number}", 1)
                    await shared.decide(lambda table, who=who: table.register(who, "role", "", {}, key))

            async with trio.open_nursery() as both:
                for shared, key in zip(tables, "ab", strict=True):
                    both.start_soon(register, shared, key)
            while not tables[0].table.epoch == tables[1].table.epoch == 20:  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert epochs[0] == epochs[1] == list(range(1, 21))
            assert tables[0].table.image() == tables[1].table.image()
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_an_etcd_that_is_away_raises_and_has_everything_when_it_is_back(tmp_path: Path) -> None:
    server = etcd.Etcd(tmp_path)
    try:
        address = f"etcd://127.0.0.1:1,{server.member}/test"  # nobody is at the first member
        async with open_store(address) as store:
            with trio.fail_after(PATIENCE_S):
                await store.put("key", b"value")
                server.kill()
                with pytest.raises(BrokenError, match="does it run"):
                    await store.get("key")
                with pytest.raises(BrokenError, match="does it run"):
                    await store.wait("other")
                await trio.to_thread.run_sync(server.start)
                assert await store.get("key") == b"value"
    finally:
        server.kill()


@pytest.mark.trio
async def test_a_torch_store_that_is_gone_raises_and_is_connected_to_again() -> None:
    pytest.importorskip("torch")
    master = serve_torch(0)
    port = master.port
    async with open_store(f"torch://127.0.0.1:{port}") as store:
        with trio.fail_after(PATIENCE_S):
            await store.put("key", b"value")
            del master
            gc.collect()
            with pytest.raises(BrokenError, match="is the process that serves it alive"):
                await store.get("key")
            master = serve_torch(port)
            assert await store.get("key") is None
            assert await store.create("key", b"anew")
    del master


@pytest.mark.parametrize(
    ("text", "members", "prefix"),
    [
        ("memory", (), "asyncfabric"),
        ("etcd://a:2379,b:2379/llm/one", ("a:2379", "b:2379"), "llm/one"),
        ("torch://[::1]:29500", ("[::1]:29500",), "asyncfabric"),
    ],
)
def test_addresses_of_stores(text: str, members: tuple[str, ...], prefix: str) -> None:
    assert StoreAddress.parse(text) == StoreAddress(text.partition(":")[0], members, prefix)


@pytest.mark.parametrize("text", ["", "redis://a:1", "etcd://a", "etcd://a:b/x", "torch://a:1,b:2", "etcd://a:1/a b"])
def test_other_texts_are_no_addresses_of_stores(text: str) -> None:
    with pytest.raises(ValueError, match="expected memory, etcd://host:port/prefix"):
        StoreAddress.parse(text)

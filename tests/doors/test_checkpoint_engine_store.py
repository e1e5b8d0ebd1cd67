"""checkpoint_engine's P2P store over asyncfabric: in place of its own, under its own code, between two processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import checkpoint_engine.p2p_store
import checkpoint_engine.ps
import pytest
import torch
from checkpoint_engine.data_types import BucketRange, H2DBucket, MemoryBuffer, MemoryBufferMetaList, MemoryBufferMetas

import asyncfabric as af
from asyncfabric.integrations import checkpoint_engine as fabric_store
from asyncfabric.integrations import process_fabric
from children import Child

THEIRS = checkpoint_engine.p2p_store.P2PStore


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[fabric_store.P2PStore]:
    """Return the store of this process, on the loopback interface."""
    monkeypatch.setattr(fabric_store, "get_ip", lambda: "127.0.0.1")
    monkeypatch.setenv("RANK", "1")
    process_fabric.configure(af.FabricConfig(rails=("local",), connect_deadline=2.0))
    made = fabric_store.P2PStore()
    yield made
    made.close()
    process_fabric.close_process_fabric()
    process_fabric.configure(None)


@pytest.fixture
def owner() -> Iterator[Child]:
    """Run the rank that owns the checkpoint."""
    with Child("checkpoint_store.py", RANK="0", ASYNCFABRIC_RAILS="local") as child:
        yield child


def checkpoint(seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random) for size in (1 << 20, 5000)]


def test_the_store_has_the_members_of_theirs_with_their_parameters() -> None:
    for name in ("register_named_tensors", "unregister_named_tensors", "batch_transfer_sync_read"):
        wanted = list(inspect.signature(getattr(THEIRS, name)).parameters)
        assert list(inspect.signature(getattr(fabric_store.P2PStore, name)).parameters) == wanted
    assert isinstance(inspect.getattr_static(THEIRS, "addr"), property)
    assert isinstance(inspect.getattr_static(fabric_store.P2PStore, "addr"), property)
    assert list(inspect.signature(THEIRS).parameters) == list(inspect.signature(fabric_store.P2PStore).parameters)


def test_parameter_servers_make_it_while_it_is_installed() -> None:
    fabric_store.install()
    fabric_store.install()
    try:
        assert checkpoint_engine.ps.P2PStore is fabric_store.P2PStore
    finally:
        fabric_store.uninstall()
    assert checkpoint_engine.ps.P2PStore is checkpoint_engine.P2PStore is THEIRS


def test_their_parameter_server_fills_a_bucket_from_another_rank(store: fabric_store.P2PStore, owner: Child) -> None:
    """The code between the seam and the trainers' buffers is theirs; only what needs a GPU is left out."""
    server: Any = object.__new__(checkpoint_engine.ps.ParameterServer)
    server._p2p_store = store
    server.device_manager = SimpleNamespace(device_module=SimpleNamespace(synchronize=lambda: None))
    metas = [
        MemoryBufferMetas(metas=[], ptr=pointer, size=tensor.nbytes)
        for pointer, tensor in zip(owner.hello["pointers"], checkpoint(1), strict=True)
    ]
    server._current_global_parameter_metas = {
        0: MemoryBufferMetaList(p2p_store_addr=owner.hello["addr"], memory_buffer_metas_list=metas, rdma_device="")
    }
    ranges = [BucketRange(0, 7, 100_000), BucketRange(1, 0, 5000), BucketRange(0, 500_000, 1)]
    bucket = H2DBucket(size=105_001, ranges=ranges, items=[])
    buffer = torch.zeros(200_000, dtype=torch.uint8)
    store.register_named_tensors({"__ipc_buffer__": buffer})
    server._copy_to_buffer("a checkpoint", bucket, buffer, owner_rank=0)
    tensors = checkpoint(1)
    expected = torch.cat([tensors[part.idx][part.offset : part.offset + part.size] for part in ranges])
    assert torch.equal(buffer[:105_001], expected) and not buffer[105_001:].any()
    assert store.unregister_named_tensors(["__ipc_buffer__"]) == 1


def test_their_parameter_server_registers_and_unregisters_its_memory_pool(store: fabric_store.P2PStore) -> None:
    server: Any = object.__new__(checkpoint_engine.ps.ParameterServer)
    server._p2p_store = store
    server._current_shared_memory_pool_user = ""
    server._memory_pool = {
        "a checkpoint": [MemoryBuffer(buffer=part, size=part.nbytes, metas=[]) for part in checkpoint(3)]
    }
    server._register_parameters_to_p2p_store("a checkpoint")
    assert sorted(store.named_tensors) == ["memory_pool_a checkpoint_0", "memory_pool_a checkpoint_1"]
    with pytest.raises(ValueError, match="registered already: memory_pool_a checkpoint_0"):
        server._register_parameters_to_p2p_store("a checkpoint")
    assert server._unregister_parameters_from_p2p_store("a checkpoint") == 2
    assert store.named_tensors == {}


def test_a_rank_that_registered_another_checkpoint_is_asked_again(store: fabric_store.P2PStore, owner: Child) -> None:
    buffer = torch.zeros(5000, dtype=torch.uint8)
    store.register_named_tensors({"buffer": buffer})
    base = buffer.data_ptr()
    store.batch_transfer_sync_read(owner.hello["addr"], [base], [owner.hello["pointers"][1]], [5000])
    assert torch.equal(buffer, checkpoint(1)[1])
    now = owner.ask("register another")
    store.batch_transfer_sync_read(now["addr"], [base], [now["pointers"][1]], [5000])
    assert torch.equal(buffer, checkpoint(2)[1])


def test_ranges_that_nobody_registered_and_ranks_that_are_gone_are_named(
    store: fabric_store.P2PStore, owner: Child
) -> None:
    buffer = torch.zeros(5000, dtype=torch.uint8)
    store.register_named_tensors({"buffer": buffer})
    address, pointer = owner.hello["addr"], owner.hello["pointers"][0]
    with pytest.raises(ValueError, match="in no tensor that this store has registered"):
        store.batch_transfer_sync_read(address, [buffer.data_ptr() + 1], [pointer], [5000])
    with pytest.raises(ValueError, match=f"in no tensor that the store at {address} has"):
        store.batch_transfer_sync_read(address, [buffer.data_ptr()], [pointer - 1], [10])
    with pytest.raises(KeyError, match="not registered: other"):
        store.unregister_named_tensors(["buffer", "other"])
    owner.kill()
    with pytest.raises(af.PeerError, match=f"no offer came from {address}"):
        store.batch_transfer_sync_read(address, [buffer.data_ptr()], [pointer], [10])
    assert not buffer.any()

"""The NIXL face over memory of a GPU: raw addresses, VRAM and DRAM mixed, prepared pages; two agents in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import asyncfabric as af
from asyncfabric.integrations.nixl import nixl_agent, nixl_agent_config

MIB = 1 << 20
LENGTH = 8 * MIB
PLACES = ["DRAM", "VRAM"]


@pytest.fixture
def agents() -> Iterator[tuple[nixl_agent, nixl_agent]]:
    config = af.FabricConfig(rails=("auto", "cuda:0"))
    a, b = (nixl_agent(name, nixl_agent_config(fabric=config)) for name in ("a", "b"))
    yield a, b
    a._close()
    b._close()


def ended(agent: nixl_agent, handle: Any) -> None:
    """Post a transfer and wait for its end."""
    deadline = time.monotonic() + 30
    state = agent.transfer(handle)
    while state != "DONE":
        assert time.monotonic() < deadline
        state = agent.check_xfer_state(handle)


def memory(place: str) -> Any:
    """Return random bytes on the host or on the GPU, from an allocation that holds more than they."""
    import torch

    content = torch.randint(0, 256, (LENGTH + 512,), dtype=torch.uint8)
    return (content.to("cuda:0") if place == "VRAM" else content)[256 : 256 + LENGTH]


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
@pytest.mark.parametrize("near", PLACES)
@pytest.mark.parametrize("far", PLACES)
def test_pages_between_all_places(agents: tuple[nixl_agent, nixl_agent], operation: str, near: str, far: str) -> None:
    import torch

    a, b = agents
    own, other = memory(near), memory(far)
    torch.cuda.synchronize()
    registered = [a.register_memory(own), b.register_memory(other)]
    a.add_remote_agent(b.get_agent_metadata())
    page, count = 8192, LENGTH // 8192
    random = np.random.default_rng(2)
    rows = [np.array([[one.data_ptr(), page, 0, page, count]], dtype=np.uint64) for one in (own, other)]
    local, remote = a.prep_xfer_dlist("", rows[0], near), a.prep_xfer_dlist("b", rows[1], far)
    first, second = random.permutation(count)[:300], random.permutation(count)[:300]
    before = [one.cpu().reshape(count, page).clone() for one in (own, other)]
    ended(a, a.make_prepped_xfer(operation, local, first, remote, second, b"moved"))
    torch.cuda.synchronize()
    if operation == "WRITE":
        before[1][second] = before[0][first]
    else:
        before[0][first] = before[1][second]
    assert torch.equal(own.cpu().reshape(count, page), before[0])
    assert torch.equal(other.cpu().reshape(count, page), before[1])
    deadline = time.monotonic() + 10
    while not (notes := b.get_new_notifs()):
        assert time.monotonic() < deadline
    assert notes == {"a": [b"moved"]}
    a.deregister_memory(registered[0])
    b.deregister_memory(registered[1])


def test_one_transfer_of_both_places(agents: tuple[nixl_agent, nixl_agent]) -> None:
    import torch

    a, b = agents
    host, device, target = memory("DRAM"), memory("VRAM"), memory("VRAM")
    torch.cuda.synchronize()
    for place in (host, device):
        a.register_memory(place)
    b.register_memory(target)
    a.add_remote_agent(b.get_agent_metadata())
    for source, at in ((host, 5), (device, MIB + 3)):
        local = a.get_xfer_descs(source[1000 : 1000 + 70_001])
        ended(a, a.initialize_xfer("WRITE", local, a.get_xfer_descs(target[at : at + 70_001]), "b"))
        assert torch.equal(target[at : at + 70_001].cpu(), source[1000 : 1000 + 70_001].cpu())

"""LMCache's transfer channel over asyncfabric: made by its own factory, with a peer that is killed and comes back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel import abstract
from lmcache.v1.distributed.transfer_channel.api import TransferChannelAddress as Address
from lmcache.v1.distributed.transfer_channel.factory import create_transfer_channel_context

import asyncfabric as af
from asyncfabric.integrations import lmcache as fabric_channel
from asyncfabric.integrations import process_fabric
from children import Child

PAGE, PAGES, SEED = 4096, 64, 7


@pytest.fixture
def memory() -> np.ndarray[Any, Any]:
    """Return the L1 memory of this process, poisoned."""
    return np.full(PAGES * PAGE, 0xEE, np.uint8)


@pytest.fixture
def channel(memory: np.ndarray[Any, Any]) -> Iterator[fabric_channel.FabricChannel]:
    """Have LMCache make the channel by its name."""
    process_fabric.configure(af.FabricConfig(rails=("local",), connect_deadline=2.0))
    fabric_channel.register()
    described = L1MemoryDesc(memory.ctypes.data, memory.nbytes, PAGE)
    context = create_transfer_channel_context("asyncfabric", described, "127.0.0.1:0", "127.0.0.1:1", backends=["UCX"])
    yield context
    context.close()
    process_fabric.close_process_fabric()
    process_fabric.configure(None)


def peer(port: int = 0) -> Child:
    return Child("lmcache_peer.py", str(port), str(SEED), ASYNCFABRIC_RAILS="local")


def bytes_of_peer() -> np.ndarray[Any, Any]:
    return np.random.default_rng(SEED).integers(0, 256, PAGES * PAGE, dtype=np.uint8)


def ended(client: Any, task: int) -> list[bool]:
    """Ask as LMCache does until the task has ended."""
    while not (result := client.query_read_status(task)).is_finished():
        assert result.succeeded_mask == []
    mask: list[bool] = result.succeeded_mask
    return mask


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (fabric_channel.FabricChannel, abstract.TransferChannelContext),
        (fabric_channel.FabricServer, abstract.TransferChannelServer),
        (fabric_channel.FabricClient, abstract.TransferChannelClient),
    ],
)
def test_classes_have_every_method_of_the_interface_with_its_parameters(ours: type, theirs: type) -> None:
    assert issubclass(ours, theirs) and not ours.__abstractmethods__  # type: ignore[attr-defined]  # of ABCMeta
    for name in theirs.__abstractmethods__ - {"__init__"}:  # type: ignore[attr-defined]  # as above
        wanted = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(getattr(ours, name)).parameters) == wanted, name


def test_objects_of_a_peer_are_read_and_nothing_beside_them_is_touched(
    channel: fabric_channel.FabricChannel, memory: np.ndarray[Any, Any]
) -> None:
    with peer() as other:
        client = channel.get_transfer_channel_client(f"127.0.0.1:{other.hello['port']}")
        assert channel.get_transfer_channel_client(f"127.0.0.1:{other.hello['port']}") is client
        assert channel.get_num_connected_clients() == 1
        local = channel.get_transfer_channel_address([(0, PAGE), (8 * PAGE, 2 * PAGE + 5)])
        assert ended(
            client, client.submit_read(local, [Address(3 * PAGE, PAGE), Address(40 * PAGE, 2 * PAGE + 5)])
        ) == [
            True,
            True,
        ]
        expected = np.full(PAGES * PAGE, 0xEE, np.uint8)
        expected[:PAGE] = bytes_of_peer()[3 * PAGE : 4 * PAGE]
        expected[8 * PAGE : 10 * PAGE + 5] = bytes_of_peer()[40 * PAGE : 42 * PAGE + 5]
        assert (memory == expected).all()
        with pytest.raises(KeyError, match="no read task 0"):
            client.query_read_status(0)
        channel.remove_transfer_channel_client(f"127.0.0.1:{other.hello['port']}")
        assert channel.get_num_connected_clients() == 0


def test_a_killed_peer_fails_its_objects_and_is_met_again_when_it_is_back(
    channel: fabric_channel.FabricChannel, memory: np.ndarray[Any, Any]
) -> None:
    first = peer()
    port = first.hello["port"]
    client = channel.get_transfer_channel_client(f"127.0.0.1:{port}")
    pages = [Address(PAGE, PAGE), Address(2 * PAGE, PAGE)]
    assert ended(client, client.submit_read(pages, pages)) == [True, True]
    first.kill()
    memory[:] = 0xEE
    assert ended(client, client.submit_read(pages, pages)) == [False, False]
    assert (memory == 0xEE).all()
    with peer(port):
        assert ended(client, client.submit_read(pages, pages)) == [True, True]
        assert (memory[PAGE : 3 * PAGE] == bytes_of_peer()[PAGE : 3 * PAGE]).all()


@pytest.mark.parametrize(
    ("local", "remote", "complaint"),
    [
        ([Address(0, PAGE)], [], "1 local addresses and 0 remote ones"),
        ([Address(1, PAGE)], [Address(0, PAGE)], "offset 1 is not a multiple of 4096"),
        ([Address(0, PAGE)], [Address(0, PAGE + 1)], "4096 bytes here and 4097 bytes at the peer"),
        ([Address(0, PAGE)], [Address(PAGES * PAGE, PAGE)], "is outside of the 262144 of"),
    ],
)
def test_addresses_that_do_not_fit_are_refused(
    channel: fabric_channel.FabricChannel, local: list[Address], remote: list[Address], complaint: str
) -> None:
    own = channel.get_transfer_channel_client(f"127.0.0.1:{channel.get_transfer_channel_server().port}")
    with pytest.raises(ValueError, match=complaint):
        own.submit_read(local, remote)
    with pytest.raises(ValueError, match="outside of the 262144 bytes of L1"):
        channel.get_transfer_channel_address([(PAGES * PAGE - 1, 2)])


def test_a_place_where_nobody_listens_is_named(channel: fabric_channel.FabricChannel) -> None:
    with pytest.raises(af.PeerError, match=r"no offer came from 127\.0\.0\.1:1 within"):
        channel.get_transfer_channel_client("127.0.0.1:1")

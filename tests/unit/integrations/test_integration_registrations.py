"""What the adapters share: registrations that are counted, and the memory behind tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from blocking_pair import open_pair

import asyncfabric as af
from asyncfabric import blocking
from asyncfabric.integrations.registrations import Range, Registrations
from asyncfabric.integrations.torch_memory import (
    ALIGNMENT,
    PACKED_BELOW,
    empty_tensors,
    offset_in_storage,
    storage_bytes,
    storage_range,
)


@pytest.fixture
def fabric() -> Iterator[blocking.Fabric]:
    with open_pair() as pair:
        yield pair.writer


def test_a_range_is_registered_once_and_released_with_its_last_holder(fabric: blocking.Fabric) -> None:
    before = len(fabric.regions())
    registrations = Registrations(lambda: fabric)
    memory = np.zeros(4096, np.uint8)
    place = Range("cpu", memory.ctypes.data, memory.nbytes)
    first = registrations.hold(place, lambda: memory)
    assert registrations.hold(place, lambda: pytest.fail("registered twice")) is first
    assert len(fabric.regions()) == before + 1
    registrations.let_go(place)
    assert not first.released and len(registrations) == 1
    registrations.let_go(place)
    assert first.released and len(registrations) == 0 and len(fabric.regions()) == before
    with pytest.raises(KeyError):
        registrations.let_go(place)
    again = registrations.hold(place, lambda: memory)
    assert again is not first and not again.released
    registrations.let_go(place)


def test_threads_that_hold_the_same_range_share_one_registration(fabric: blocking.Fabric) -> None:
    before = len(fabric.regions())
    registrations = Registrations(lambda: fabric)
    memory = np.zeros(4096, np.uint8)
    place = Range("cpu", memory.ctypes.data, memory.nbytes)
    start, found = threading.Barrier(4), []

    def hold() -> None:
        start.wait()
        for _ in range(50):
            found.append(registrations.hold(place, lambda: memory).released)
            registrations.let_go(place)

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False] * 200
    assert len(registrations) == 0 and len(fabric.regions()) == before


def test_memory_that_cannot_be_registered_is_held_by_nobody(fabric: blocking.Fabric) -> None:
    registrations = Registrations(lambda: fabric)
    with pytest.raises(ValueError, match="empty"):
        registrations.hold(Range("cpu", 0, 0), lambda: b"")
    assert len(registrations) == 0


def test_views_of_one_tensor_have_the_range_of_its_storage() -> None:
    whole = torch.arange(100, dtype=torch.int32)
    part = whole[10:20]
    assert storage_range(part) == storage_range(whole) == Range("cpu", whole.data_ptr(), 400)
    assert offset_in_storage(part) == 40
    assert torch.equal(storage_bytes(part).view(torch.int32), whole)
    assert storage_bytes(part).data_ptr() == whole.data_ptr()


def test_small_tensors_share_a_buffer_and_large_ones_have_their_own() -> None:
    large = (PACKED_BELOW // 4,)
    kinds = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool)
    layout = list(zip(((3,), large, (), (0, 5), (1,)), kinds, strict=True))
    tensors, buffers, places = empty_tensors(layout, "cpu")
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == layout
    assert [buffer.nbytes for buffer in buffers] == [3 * ALIGNMENT, PACKED_BELOW]
    assert [place.buffer for place in places] == [0, 1, 0, 0, 0]
    for tensor, (number, offset, length) in zip(tensors, places, strict=True):
        assert tensor.nbytes == length
        if length:
            assert tensor.data_ptr() == buffers[number].data_ptr() + offset
            assert offset % ALIGNMENT == 0


def test_an_object_of_large_tensors_alone_has_no_shared_buffer() -> None:
    _, buffers, places = empty_tensors([((PACKED_BELOW,), torch.uint8)], "cpu")
    assert len(buffers) == 1 and places[0].buffer == 0
    assert empty_tensors([], "cpu") == ([], [], [])


def test_a_key_of_held_memory_permits_reading_only(fabric: blocking.Fabric) -> None:
    registrations = Registrations(lambda: fabric)
    memory = np.zeros(4096, np.uint8)
    place = Range("cpu", memory.ctypes.data, memory.nbytes)
    key = registrations.hold(place, lambda: memory)[16:32].key("read")
    assert isinstance(key, af.RegionKey) and (key.access, key.length) == ("read", 16)
    registrations.let_go(place)

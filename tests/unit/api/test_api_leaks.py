"""Regions that are dropped and fabrics that are never closed are named; what is given back is free."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import anyio
import numpy as np
import pytest
import torch
from fabrics import open_pair

import asyncfabric as af
from asyncfabric._bridge.faults import MAX_WATCH_WORDS
from asyncfabric.testing import FakeEngine, FakeNetwork


@pytest.fixture(params=["fake", "native"])
def factory(request: pytest.FixtureRequest) -> Iterator[object]:
    """Yield the engine_factory of a fabric: of a fake, or of the compiled engine."""
    if request.param == "native":
        pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")
        yield None
    else:
        network = FakeNetwork()
        yield lambda config: FakeEngine(config, network)


LOCAL = af.FabricConfig(rails=("local",))


@pytest.mark.anyio
async def test_a_released_buffer_is_exported_no_longer(factory: object) -> None:
    async with af.open_fabric(LOCAL, engine_factory=factory) as fabric:  # type: ignore[arg-type]
        buffer = bytearray(64)
        region = await fabric.register(buffer)
        part = region[8:16]
        with pytest.raises(BufferError):
            buffer.append(0)
        await region.release()
        buffer.append(0)
        for late in (lambda: region.memory, lambda: part.memory, lambda: region.tensor(torch.uint8)):
            with pytest.raises(af.ClosedError, match="Region 1"):
                late()
        assert region.released and region.length == 64


@pytest.mark.anyio
async def test_a_view_keeps_a_released_buffer_exported(factory: object) -> None:
    async with af.open_fabric(LOCAL, engine_factory=factory) as fabric:  # type: ignore[arg-type]
        buffer = bytearray(b"0123456789abcdef")
        region = await fabric.register(buffer)
        view, tensor = region[4:8].memory, region.tensor(torch.uint8)
        await region.release()
        with pytest.raises(BufferError):
            buffer.append(0)
        assert bytes(view) == b"4567" and int(tensor[0]) == ord("0")
        del view, tensor
        gc.collect()
        buffer.append(0)


@pytest.mark.anyio
async def test_closing_the_fabric_gives_buffers_back_too(factory: object) -> None:
    buffer, frozen = bytearray(64), np.zeros(64, np.uint8)
    async with af.open_fabric(LOCAL, engine_factory=factory) as fabric:  # type: ignore[arg-type]
        region, other = await fabric.register(buffer), await fabric.register(frozen)
    buffer.append(0)
    for closed in (region, other):
        with pytest.raises(af.ClosedError):
            _ = closed.memory


@pytest.mark.anyio
async def test_a_region_that_is_dropped_is_named_and_its_memory_stays(factory: object) -> None:
    async with af.open_fabric(LOCAL, engine_factory=factory) as fabric:  # type: ignore[arg-type]
        buffer = bytearray(64)
        for make in (lambda: fabric.register(buffer), lambda: fabric.allocate(128)):
            region = await make()
            name = repr(region)
            with pytest.warns(ResourceWarning, match="was dropped without .*region.release") as caught:
                del region
                gc.collect()
            assert name in str(caught[0].message)
        assert [one.length_bytes for one in fabric.regions()] == [64, 128]
        with pytest.raises(BufferError):
            buffer.append(0)
    buffer.append(0)


@pytest.mark.anyio
async def test_what_is_in_use_or_given_back_is_not_dropped() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with open_pair(hold=True) as p:
            region = await p.writer.allocate(64)
            transfer = p.writer.write(region, p.key, 0)
            part = region[:8]
            del region
            gc.collect()
            p.network.release()
            await transfer
            await part.region.release()
            del part, transfer
            gc.collect()
        del p
        gc.collect()


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_a_fabric_that_is_never_closed_is_named(backend: str) -> None:
    engine = FakeEngine(network=FakeNetwork())

    async def leave_open() -> None:
        await af.open_fabric(engine_factory=lambda config: engine).__aenter__()

    with pytest.warns(ResourceWarning, match="never closed.*aclose"):
        anyio.run(leave_open, backend=backend)
        gc.collect()
    engine.close()


@pytest.mark.anyio
async def test_the_bound_of_watch_words_is_named(factory: object) -> None:
    async with af.open_fabric(LOCAL, engine_factory=factory) as fabric:  # type: ignore[arg-type]
        words = [fabric.watch() for _ in range(MAX_WATCH_WORDS)]
        for word in words:
            await word.__aenter__()
        with pytest.raises(af.BusyError, match=f"{MAX_WATCH_WORDS} words.*leave the `async with`") as caught:
            await fabric.watch().__aenter__()
        assert "max_ops" not in str(caught.value)
        await words.pop().__aexit__(None, None, None)
        async with fabric.watch():
            pass
        for word in words:
            await word.__aexit__(None, None, None)

"""Streams and kernels: writes after a stream, streams that wait for a counter, watch words that kernels bump."""

from __future__ import annotations

import anyio
import numpy
import pytest
from kernels import kernel, on_stream

import asyncfabric as af

pytestmark = pytest.mark.anyio

MIB = 1 << 20
CONFIG = af.FabricConfig(rails=("cuda:0",))


async def test_what_is_counted_has_landed(far: int) -> None:
    import torch

    length = 1024 * MIB
    there = af.FabricConfig(rails=(f"cuda:{far}",), polling="busy")
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(there) as target:
        source = await writer.allocate(length, device="cuda:0")
        exposed = await target.allocate(length, device=f"cuda:{far}")
        counter = target.counter()
        tensor, tail = source.tensor(torch.uint8), exposed[length - 4096 :].tensor(torch.uint8)
        for number in range(1, 6):
            tensor.fill_(number)
            torch.cuda.synchronize(0)
            transfer = writer.write(source, exposed.key(), 0, imm=counter.imm)
            await counter.wait(number)
            # By a stream that knows nothing of the copy: no synchronisation hides bytes that come late.
            assert int(tail.cpu()[-1]) == number
            await transfer
            assert int(tail.cpu().min()) == number


@pytest.mark.alone
async def test_nothing_lands_once_a_revocation_has_returned(far: int) -> None:
    import torch

    length = 1024 * MIB
    there = af.FabricConfig(rails=(f"cuda:{far}",), polling="busy")
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(there) as target:
        source = await writer.allocate(length, device="cuda:0")
        exposed = await target.allocate(length, device=f"cuda:{far}")
        source.tensor(torch.uint8).fill_(7)
        landed = exposed.tensor(torch.uint8)
        torch.cuda.synchronize(0)
        met = 0
        for _ in range(40):  # where much else runs, all copies may be through before this process goes on
            key = exposed.key()
            await writer.write(source[:MIB], key, 0)  # the key is attached
            before = writer.statistics().bytes_written
            flood = [writer.write(source, key, 0) for _ in range(16)]
            while writer.statistics().bytes_written < before + 512 * MIB:
                pass  # the copies are under way
            await exposed.revoke()
            landed.fill_(9)  # beside whatever may still be copying
            stale = 0
            for transfer in flood:
                try:
                    await transfer
                except af.StaleKeyError:
                    stale += 1
            torch.cuda.synchronize(far)
            assert int(landed.min()) == 9, "a copy under the old key landed after revoke() returned"
            met += bool(stale)
            if met == 5:
                return
        assert met, "all writes were through before each revocation: the test shows nothing"


async def test_a_write_after_a_stream_carries_what_the_stream_made() -> None:
    import torch

    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target:
        source = await writer.allocate(8 * MIB, device="cuda:0")
        exposed = await target.allocate(8 * MIB, device="cuda:0")
        tensor, landed = source.tensor(torch.uint8), exposed.tensor(torch.uint8)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for round_number in range(1, 6):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
                tensor.fill_(round_number)
            transfer = writer.write(source, exposed.key(), 0, after=stream)
            assert not stream.query(), "the stream was done already: the test shows nothing"
            await transfer
            torch.cuda.synchronize()
            assert bool((landed == round_number).all())


async def test_cancelling_a_write_that_waits_for_a_stream_sends_nothing() -> None:
    import torch

    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target:
        source = await writer.allocate(MIB, device="cuda:0")
        exposed = await target.allocate(MIB, device="cuda:0")
        await writer.write(source, exposed.key(), 0)
        source.tensor(torch.uint8).fill_(9)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
        transfer = writer.write(source, exposed.key(), 0, after=stream)
        with anyio.move_on_after(0.001) as scope:
            await transfer
        assert scope.cancelled_caught and not stream.query()
        torch.cuda.synchronize()
        assert int(exposed.tensor(torch.uint8).sum()) == 0


async def test_a_stream_waits_for_a_counter_also_inside_a_graph() -> None:
    import torch

    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target:
        source = await writer.allocate(4 * MIB, device="cuda:0")
        exposed = await target.allocate(4 * MIB, device="cuda:0")
        landed, out = exposed.tensor(torch.uint8), torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda:0")
        counter = target.counter()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        counter.stream_wait(stream, 1)
        with torch.cuda.stream(stream):
            out.copy_(landed)
        assert not stream.query()
        source.tensor(torch.uint8).fill_(5)
        torch.cuda.current_stream().synchronize()
        await writer.write(source, exposed.key(), 0, imm=counter.imm)
        await counter.wait(1)
        stream.synchronize()
        assert bool((out == 5).all())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            counter.stream_wait(torch.cuda.current_stream(), 2)
            out.copy_(landed)
        with torch.cuda.stream(stream):
            graph.replay()
        assert not stream.query()
        source.tensor(torch.uint8).fill_(6)
        torch.cuda.current_stream().synchronize()
        await writer.write(source, exposed.key(), 0, imm=counter.imm)
        await counter.wait(2)
        stream.synchronize()
        assert bool((out == 6).all())
        counter.stream_wait(stream, 100)
        assert not stream.query()
        counter.close()
        stream.synchronize()  # a closed counter lets its streams go on


async def test_a_kernel_waits_for_a_flag_and_bumps_a_watch_word() -> None:
    import torch

    wait, bump = kernel("wait_then_copy"), kernel("bump")
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(CONFIG) as target, target.watch() as word:
        source = await writer.allocate(MIB, device="cuda:0")
        exposed = await target.allocate(MIB, device="cuda:0")
        source.tensor(torch.int32).fill_(0x01020304)
        out = torch.zeros(MIB // 4, dtype=torch.int32, device="cuda:0")
        torch.cuda.synchronize()
        counter = target.counter()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with on_stream(stream):
            wait((1,), (256,), (counter.flag_address, 1, exposed._base, out.data_ptr(), numpy.int32(MIB // 4)))
            bump((1,), (1,), (word.address, 77))
        assert word.value == 0
        await writer.write(source, exposed.key(), 0, imm=counter.imm)
        with anyio.fail_after(10):
            async for old, new in word:
                assert (old, new) == (0, 77)
                break
        stream.synchronize()
        assert bool((out == 0x01020304).all())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), on_stream(torch.cuda.current_stream()):
            bump((1,), (1,), (word.address, 78))
        graph.replay()
        with anyio.fail_after(10):
            async for _, new in word:
                assert new == 78
                break


async def test_a_kernel_in_a_graph_sets_off_writes_layer_by_layer(far: int) -> None:
    import torch

    bump = kernel("bump")
    layers, there = 8, af.FabricConfig(rails=(f"cuda:{far}",))
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(there) as target, writer.watch() as word:
        source = await writer.allocate(layers * MIB, device="cuda:0")
        exposed = await target.allocate(layers * MIB, device=f"cuda:{far}")
        computed, landed = source.tensor(torch.uint8).view(layers, MIB), exposed.tensor(torch.uint8).view(layers, MIB)
        counter, key = target.counter(), exposed.key()
        base = torch.zeros(1, dtype=torch.int64, device="cuda:0")
        values = torch.zeros(layers, MIB, dtype=torch.int32, device="cuda:0")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        await writer.write(source[:1], key, 0)
        with torch.cuda.graph(graph, stream=stream), on_stream(torch.cuda.current_stream()):
            for layer in range(layers):
                values[layer] = (base + layer).to(torch.int32)
                computed[layer] = values[layer].to(torch.uint8)
                bump((1,), (1,), (word.address, numpy.uint64(layer + 1)))
        for step in range(3):
            word.store(0)
            base.fill_(10 * step + 1)
            torch.cuda.synchronize()
            transfers = [
                writer.write(
                    source[layer * MIB : (layer + 1) * MIB],
                    key,
                    layer * MIB,
                    imm=counter.imm,
                    after=word.reaches(layer + 1),
                )
                for layer in range(layers)
            ]
            assert not any(transfer.done for transfer in transfers)
            with torch.cuda.stream(stream):
                graph.replay()
            with anyio.fail_after(60):
                for transfer in transfers:
                    await transfer
                await counter.wait(layers * (step + 1))
            torch.cuda.synchronize()
            for layer in range(layers):
                assert bool((landed[layer] == 10 * step + 1 + layer).all()), (step, layer)


@pytest.mark.alone
async def test_copy_engines_move_bytes_while_every_multiprocessor_is_taken(far: int) -> None:
    import torch

    if far == 0:
        pytest.skip("ONE GPU: a copy inside it is not what is asked about")
    occupy = kernel("occupy")
    torch.cuda.set_device(0)
    there = af.FabricConfig(rails=(f"cuda:{far}",))
    async with af.open_fabric(CONFIG) as writer, af.open_fabric(there) as target, writer.watch() as word:
        source = await writer.allocate(256 * MIB, device="cuda:0")
        exposed = await target.allocate(256 * MIB, device=f"cuda:{far}")
        source.tensor(torch.uint8).fill_(3)
        torch.cuda.synchronize(0)
        key, stream = exposed.key(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        await writer.write(source[:MIB], key, 0)
        await writer.write_pages(source, torch.arange(64), key, torch.arange(64), page_bytes=4096)
        properties = torch.cuda.get_device_properties(0)
        with on_stream(stream):  # as many threads as the GPU has room for
            occupy((2 * properties.multi_processor_count,), (1024,), (word.address, 1))
        try:
            with anyio.fail_after(10):
                await writer.write(source, key, 0)
            assert not stream.query(), "the kernel is gone: the test shows nothing"
            assert int(exposed[128 * MIB :].tensor(torch.uint8).min()) == 3
            pages = writer.write_pages(source, torch.arange(64), key, torch.arange(64), page_bytes=4096)
            await anyio.sleep(0.3)
            assert not pages.done, "a kernel of ours found room: not every multiprocessor was taken"
        finally:
            word.store(1)
        await pages
        stream.synchronize()

"""Transfers: results, any number of awaiters, cancellation that drains first (INV-2), failures that teach."""

from __future__ import annotations

import gc
import weakref

import anyio
import pytest
from fabrics import Outcome, open_fake, open_pair, settled, waiting_for

import asyncfabric as af
from asyncfabric._bridge.status import StatusCode

pytestmark = pytest.mark.anyio


async def test_a_write_arrives_and_reports_what_it_did() -> None:
    async with open_pair() as p:
        transfer = p.writer.write(p.source[3:103], p.key, 7)
        result = await transfer
        assert (result.bytes, result.rails) == (100, (0,))
        assert result.duration >= 0
        assert transfer.done and transfer.bytes == transfer.total_bytes == 100
        assert await transfer is result
        assert bytes(p.target.memory[7:107]) == bytes(p.source.memory[3:103])
        assert p.target.memory[6] == p.target.memory[107] == 0


async def test_any_number_of_tasks_may_await_one_transfer() -> None:
    async with open_pair(hold=True) as p, anyio.create_task_group() as tasks:
        transfer = p.writer.write(p.source[:100], p.key, 0)
        outcomes = [Outcome() for _ in range(5)]
        for outcome in outcomes:
            tasks.start_soon(outcome.run, lambda: waiting_for(transfer))
        await settled()
        assert not transfer.done
        p.network.deliver()
        result = await transfer
        await settled()
        assert all(outcome.value is result for outcome in outcomes)


async def test_nothing_to_move_ends_at_once() -> None:
    async with open_pair(hold=True) as p:
        for nothing in (
            p.writer.write_pages(p.source, [], p.key, [], page_bytes=8, imm=3),
            p.writer.scatter(p.source, [], imm=3),
            p.writer.barrier(af.PeerGroup(), 3),
        ):
            assert nothing.done
            assert (await nothing).bytes == 0
        empty = p.writer.write(p.source[5:5], p.key, len(p.target), imm=3)
        p.network.release()
        assert (await empty).bytes == 0
        assert await p.reader.counter(3).wait(1) == 1


async def test_cancelling_the_await_drains_what_was_posted_first() -> None:
    async with open_pair(hold=True) as p, anyio.create_task_group() as tasks:
        transfer = p.writer.write(p.source[:100], p.key, 0)
        outcome = Outcome()
        tasks.start_soon(outcome.run, lambda: waiting_for(transfer))
        await settled()
        outcome.scope.cancel()
        await settled()
        assert not outcome.ended, "INV-2: the await ended while the posted write could still read the memory"
        p.network.deliver()
        await settled()
        assert outcome.cancelled and transfer.done


async def test_cancelling_before_anything_was_posted_ends_with_no_bytes() -> None:
    async with open_pair(hold=True, window=1) as p:
        first = p.writer.write(p.source[:100], p.key, 0)
        second = p.writer.write(p.source[:100], p.key, 200)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await second
        assert scope.cancelled_caught and second.done and second.bytes == 0
        p.network.release()
        await first
        assert bytes(p.target.memory[200:300]) == bytes(100)
        with pytest.raises(af.TransferError, match="0 of 100 bytes") as caught:
            await second
        assert caught.value.bytes == 0


async def test_a_cancelled_awaiter_does_not_take_the_transfer_from_another() -> None:
    async with open_pair(hold=True, window=1) as p, anyio.create_task_group() as tasks:
        first = p.writer.write(p.source[:10], p.key, 0)
        second = p.writer.write(p.source[:100], p.key, 200)
        leaving, staying = Outcome(), Outcome()
        for outcome in (leaving, staying):
            tasks.start_soon(outcome.run, lambda: waiting_for(second))
        await settled()
        leaving.scope.cancel()
        await settled()
        assert not leaving.ended, "INV-2: it left while the transfer goes on"
        p.network.release()
        await first
        await settled()
        assert leaving.cancelled and staying.value.bytes == 100


async def test_the_last_awaiter_to_be_cancelled_cancels_the_transfer() -> None:
    async with open_pair(hold=True, window=1) as p, anyio.create_task_group() as tasks:
        p.writer.write(p.source[:10], p.key, 0)
        second = p.writer.write(p.source[:100], p.key, 200)
        outcomes = [Outcome(), Outcome()]
        for outcome in outcomes:
            tasks.start_soon(outcome.run, lambda: waiting_for(second))
        await settled()
        for outcome in outcomes:
            outcome.scope.cancel()
        await settled()
        assert all(outcome.cancelled for outcome in outcomes) and second.bytes == 0


async def test_cancel_of_a_transfer_is_an_error_for_its_awaiters() -> None:
    async with open_pair(hold=True, window=1) as p:
        p.writer.write(p.source[:10], p.key, 0)
        transfer = p.writer.write(p.source[:100], p.key, 0)
        assert not transfer.done
        with pytest.raises(af.BusyError, match="await it first"):
            transfer.result()
        transfer.cancel()
        transfer.cancel()
        with pytest.raises(af.TransferError, match="cancelled") as caught:
            await transfer
        assert "write of 100 bytes" in str(caught.value) and caught.value.remedy
        transfer.cancel()


async def test_awaiting_a_done_transfer_sees_a_pending_cancellation() -> None:
    async with open_pair() as p:
        transfer = p.writer.write(p.source[:10], p.key, 0)
        await transfer
        with anyio.CancelScope() as scope:
            scope.cancel()
            await transfer
        assert scope.cancelled_caught


async def test_a_loop_of_ready_transfers_lets_others_run_and_deadlines_pass() -> None:
    async with open_pair() as p:
        with anyio.move_on_after(0.05) as scope:
            while True:
                await p.writer.write(p.source[:10], p.key, 0)
        assert scope.cancelled_caught


async def test_wait_all_waits_for_all_and_raises_the_first_failure() -> None:
    async with open_pair(hold=True) as p:
        transfers = [p.writer.write(p.source[:n], p.key, 0) for n in range(1, 6)]
        p.network.fail_next(StatusCode.TRANSPORT, raw=5)
        p.network.release()
        with pytest.raises(af.TransferError, match="transport reported") as caught:
            await af.wait_all(transfers)
        assert caught.value.raw == 5
        assert all(transfer.done for transfer in transfers)
        assert [result.bytes for result in await af.wait_all(transfers[1:])] == [2, 3, 4, 5]
        assert await af.wait_all([]) == []


async def test_cancelling_wait_all_cancels_what_is_unposted_and_drains_the_rest() -> None:
    async with open_pair(hold=True, window=2) as p, anyio.create_task_group() as tasks:
        transfers = [p.writer.write(p.source[:10], p.key, 0) for _ in range(6)]
        outcome = Outcome()
        tasks.start_soon(outcome.run, lambda: af.wait_all(transfers))
        await settled()
        outcome.scope.cancel()
        await settled()
        assert not outcome.ended
        p.network.deliver()
        await settled()
        assert outcome.cancelled and all(transfer.done for transfer in transfers)
        assert [transfer.bytes for transfer in transfers[2:]] == [0] * 4


async def test_a_failure_names_op_region_peer_and_what_to_do() -> None:
    async with open_pair() as p:
        p.network.fail_next(StatusCode.TRANSPORT, raw=110)
        transfer = p.writer.write(p.source[:64], p.key, 0)
        with pytest.raises(af.TransferError) as first:
            await transfer
        with pytest.raises(af.TransferError) as second:
            await transfer
        assert first.value is not second.value, "tracebacks of two awaiters must not grow on one exception"
        text = str(first.value)
        for word in (
            "write of 64 bytes",
            "region",
            "110: Connection timed out",
            "of 64 bytes had left",
            "fabric.rails",
        ):
            assert word in text
        assert first.value.raw == 110


async def test_results_live_as_long_as_their_transfer_only() -> None:
    async with open_pair() as p:
        transfer = p.writer.write(p.source[:64], p.key, 0)
        await transfer
        gone = weakref.ref(transfer)
        del transfer
        gc.collect()
        assert gone() is None


async def test_an_unawaited_transfer_keeps_its_memory_until_it_ends() -> None:
    async with open_pair(hold=True) as p:
        buffer = bytearray(b"x" * 64)
        region = await p.writer.register(buffer)
        p.writer.write(region, p.key, 0)
        del region
        gc.collect()
        with pytest.raises(BufferError):
            buffer.extend(b"more")
        p.network.release()
        assert bytes(p.target.memory[:64]) == b"x" * 64


async def test_submitting_without_awaiting_does_not_fill_anything() -> None:
    async with open_pair(af.FabricConfig(max_ops=64)) as p:
        for _ in range(2000):
            p.writer.write(p.source[:8], p.key, 0)
        assert len(p.writer._dispatcher.parked) <= 256


async def test_a_full_queue_is_busy_and_wait_writable_ends_when_there_is_room() -> None:
    async with open_pair(af.FabricConfig(max_ops=4), hold=True) as p, anyio.create_task_group() as tasks:
        transfers = [p.writer.write(p.source[:8], p.key, 0) for _ in range(4)]
        with pytest.raises(af.BusyError, match="wait_writable"):
            p.writer.write(p.source[:8], p.key, 0)
        outcome = Outcome()
        tasks.start_soon(outcome.run, p.writer.wait_writable)
        await settled()
        assert not outcome.ended
        p.network.deliver(1)
        await settled()
        assert outcome.ended and outcome.error is None
        transfers.append(p.writer.write(p.source[:8], p.key, 0))
        p.network.release()
        await af.wait_all(transfers)
        await p.writer.wait_writable()


async def test_reads_bring_bytes_and_state_when_no_rail_can() -> None:
    async with open_pair() as p:
        p.target.memory[10:14] = b"data"
        await p.writer.read(p.key, 10, p.source[0:4])
        assert bytes(p.source.memory[:4]) == b"data"
    async with open_pair(can_read=False) as p:
        with pytest.raises(af.TransferError, match="can_read"):
            await p.writer.read(p.key, 10, p.source[0:4])


async def test_scatter_and_pages_land_where_they_should() -> None:
    async with open_pair() as p:
        counter = p.reader.counter()
        rows = [af.ScatterTarget(p.key, 10 * i, 100 * i, 3 + i) for i in range(4)]
        assert (await p.writer.scatter(p.source[100:], rows, imm=counter.imm)).bytes == 3 + 4 + 5 + 6
        for row in rows:
            expected = p.source.memory[100 + row.source_offset :][: row.length_bytes]
            assert bytes(p.target.memory[row.offset :][: row.length_bytes]) == bytes(expected)
        assert await counter.wait(4) == 4
        p.writer.write_pages(
            p.source,
            range(3),
            p.key,
            (5, 4, 5),
            page_bytes=16,
            source_stride=32,
            target_stride=64,
            source_offset=8,
            target_offset=1024,
            imm=counter.imm,
        )
        assert await counter.wait(7) == 7
        assert bytes(p.target.memory[1024 + 4 * 64 :][:16]) == bytes(p.source.memory[8 + 32 :][:16])


async def test_a_key_object_may_be_used_by_several_fabrics() -> None:
    async with open_pair() as p, open_fake(p.network) as third:
        mine = await third.allocate(64)
        for _time in range(2):
            await third.write(mine, p.key, 0)
            await p.writer.write(p.source[:64], p.key, 64)
        assert bytes(p.target.memory[:64]) == bytes(64)
        assert bytes(p.target.memory[64:128]) == bytes(p.source.memory[:64])


async def test_keys_that_nobody_holds_are_closed_in_the_engine() -> None:
    async with open_pair() as p:
        closed: list[int] = []
        engine = p.writer._dispatcher.engine
        real = engine.close_key

        def close_key(key: int) -> None:
            closed.append(key)
            real(key)

        engine.close_key = close_key  # type: ignore[method-assign]
        transfers = [p.writer.write(p.source[:8], p.target[8 * n :].key(), 0) for n in range(20)]
        await af.wait_all(transfers)
        del transfers
        gc.collect()
        await p.writer.write(p.source[:8], p.target[4:].key(), 0)
        assert len(set(closed)) == len(closed) == 20


async def test_transfers_and_fabrics_state_what_they_are() -> None:
    async with open_pair(hold=True) as p:
        transfer = p.writer.write(p.source[:100], p.key, 0)
        assert repr(transfer).startswith("<Transfer pending: write of 100 bytes (<RegionSlice [0:100] of region 1>")
        p.network.fail_next(StatusCode.TRANSPORT)
        p.network.release()
        assert transfer.done and "failed" in repr(transfer)
        assert repr(p.writer) == f"<Fabric {p.writer.address.incarnation:016x}>"
        assert repr(p.key).startswith("<RegionKey read-write 65536 bytes, region 1 generation 1 of")

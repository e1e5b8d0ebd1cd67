"""The ledger of regions: owners release what they registered, and nothing while a lease is out."""

from __future__ import annotations

import pytest
import trio
import trio.testing

import asyncfabric as af
from asyncfabric.actors.region_ledger import RegionLedger, RegisteredRegion
from asyncfabric.errors import ClosedError

pytestmark = pytest.mark.trio


class Memory:
    """A region that notes its release."""

    def __init__(self, log: list[str], name: str, length: int = 64, error: Exception | None = None) -> None:
        self._log, self._name, self._error = log, name, error
        self.length = length

    async def register(self) -> Memory:
        await trio.sleep(2)
        return self

    async def release(self) -> None:
        await trio.lowlevel.checkpoint()
        self._log.append(self._name)
        if self._error is not None:
            raise self._error


def accepts_a_region(region: af.Region) -> RegisteredRegion:
    return region  # the type checker compares


async def test_regions_are_released_with_their_owner(autojump_clock: trio.testing.MockClock) -> None:
    log: list[str] = []
    ledger = RegionLedger()
    async with ledger.open_owner("stream 7") as owner:
        await owner.register(Memory(log, "first", 100).register)
        await owner.register(Memory(log, "second").register)
        await trio.sleep(5)
        row, _ = ledger.rows()
        assert (row.owner, row.bytes, row.age_s, row.cost_s) == ("stream 7", 100, pytest.approx(7), pytest.approx(2))
        assert (row.leases, row.closing) == (0, False)
        assert ledger.bytes == 164
    assert log == ["second", "first"]
    assert ledger.rows() == ()
    with pytest.raises(ClosedError, match="stream 7 has ended"):
        await owner.register(Memory(log, "late").register)


async def test_nothing_is_released_while_a_lease_is_out(autojump_clock: trio.testing.MockClock) -> None:
    log: list[str] = []
    ledger = RegionLedger()
    memory = Memory(log, "pages")

    async def own(task_status: trio.TaskStatus[None]) -> None:
        async with ledger.open_owner("pool") as owner:
            await owner.register(memory.register)
            task_status.started()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(own)
        with ledger.lease(memory), ledger.lease(memory):
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.sleep(100)
                assert log == []
                assert (ledger.rows()[0].leases, ledger.rows()[0].closing) == (2, True)
                with pytest.raises(ClosedError, match="being released"), ledger.lease(memory):
                    pass
    assert log == ["pages"]


async def test_a_failed_release_does_not_keep_the_others(autojump_clock: trio.testing.MockClock) -> None:
    log: list[str] = []
    ledger = RegionLedger()
    with pytest.raises(ExceptionGroup) as caught:
        async with ledger.open_owner("pool") as owner:
            for name in ("one", "two"):
                await owner.register(Memory(log, name, error=OSError(name)).register)
            await owner.register(Memory(log, "three").register)
    assert [str(error) for error in caught.value.exceptions] == ["two", "one"]
    assert log == ["three", "two", "one"]
    assert ledger.rows() == ()


async def test_an_owner_that_ends_while_registering_leaves_nothing(autojump_clock: trio.testing.MockClock) -> None:
    log: list[str] = []
    ledger = RegionLedger()
    async with trio.open_nursery() as nursery, ledger.open_owner("pool") as owner:

        async def register() -> None:
            with pytest.raises(ClosedError, match="pool ended while"):
                await owner.register(Memory(log, "late").register)

        nursery.start_soon(register)
        await trio.sleep(1)
    assert log == ["late"]
    assert ledger.rows() == ()

"""Task groups whose failures come out bare."""

from __future__ import annotations

import anyio
import pytest

from asyncfabric._groups import unwrapped


@pytest.mark.anyio
@pytest.mark.parametrize("cancelled", [False, True], ids=["alone", "as the others are cancelled"])
async def test_a_failure_comes_out_bare(cancelled: bool) -> None:
    with anyio.CancelScope() as outside, pytest.raises(KeyError), unwrapped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            await anyio.lowlevel.checkpoint()
            if cancelled:
                outside.cancel()
            raise KeyError


@pytest.mark.anyio
async def test_a_cancellation_ends_at_its_scope() -> None:
    with anyio.CancelScope() as outside, unwrapped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            outside.cancel()
    assert outside.cancelled_caught


@pytest.mark.trio
async def test_an_interrupt_is_not_replaced_by_a_failure() -> None:
    async def fail() -> None:
        raise KeyError

    async def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(BaseExceptionGroup) as raised, unwrapped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            tasks.start_soon(interrupt)
    assert raised.group_contains(KeyboardInterrupt)

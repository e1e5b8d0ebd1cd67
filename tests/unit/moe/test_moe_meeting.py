"""Where ranks of an exchange meet: who is lost before it gave its card is named, and no exchange waits for another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
from moe_fixture import right_step

import asyncfabric as af
from asyncfabric.moe import MissingRankError, MoeConfig, MoeGroup, open_moe

SMALL: dict[str, Any] = {"num_experts": 9, "top_k": 3, "hidden": 64, "max_tokens": 12, "ranks": 2}
PATIENCE_S = 20.0


@asynccontextmanager
async def fabrics_of(ranks: int) -> AsyncIterator[list[af.Fabric]]:
    with anyio.fail_after(PATIENCE_S):
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(af.open_fabric()) for _ in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_rank_that_is_lost_before_it_opened_is_named(backend: str) -> None:
    """Rank 1 is connected to and never opens its exchange; nobody set a deadline."""

    async def main() -> None:
        async with fabrics_of(1) as fabrics:
            mine = fabrics[0]
            async with af.open_fabric() as other, anyio.create_task_group() as tasks:
                group = MoeGroup(0, [mine.address, other.address])
                named: list[MissingRankError] = []

                async def open_alone() -> None:
                    with pytest.raises(MissingRankError) as raised:
                        async with open_moe(mine, group, MoeConfig(**SMALL)):
                            pass
                    named.append(raised.value)

                tasks.start_soon(open_alone)
                heard = await other.messages().__anext__()  # its card: from here on it waits for ours
                assert b"moe" in heard.payload
                await other.aclose()
            assert named[0].ranks == (1,) and named[0].lost

    anyio.run(main, backend=backend)


@pytest.mark.slow
def test_an_exchange_that_waits_for_a_rank_holds_up_no_other_one() -> None:
    """On rank 0 the first exchange waits for a rank that does not open it; the second one opens and works."""

    async def main() -> None:
        config = MoeConfig(**SMALL)
        async with fabrics_of(2) as fabrics, anyio.create_task_group() as tasks:
            addresses = [fabric.address for fabric in fabrics]

            async def wait_in_vain() -> None:
                async with open_moe(fabrics[0], MoeGroup(0, addresses, "first"), config):
                    raise AssertionError("opened without the other rank")

            async def second(rank: int) -> None:
                async with open_moe(fabrics[rank], MoeGroup(rank, addresses, "second"), config) as moe:
                    await right_step(moe, 1)

            tasks.start_soon(wait_in_vain)
            heard = await fabrics[1].messages().__anext__()
            assert b"first" in heard.payload
            async with anyio.create_task_group() as both:
                both.start_soon(second, 0)
                both.start_soon(second, 1)
            tasks.cancel_scope.cancel()

    anyio.run(main, backend="trio")

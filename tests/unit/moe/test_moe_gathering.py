"""Ranks of an exchange give each other cards: who is lost before is named, and no exchange waits for another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
from moe_fixture import right_step

import asyncfabric as af
from asyncfabric.control import LocalChannels, MemberChannel
from asyncfabric.moe import CARD_CODEC, Card, CardChannel, MissingRankError, MoeConfig, MoeGroup, open_moe
from asyncfabric.moe.gathering import _fabric_channel

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
                received = await other.messages().__anext__()  # its card: from here on it waits for ours
                assert b"moe" in received.payload
                await other.aclose()
            assert named[0].ranks == (1,) and named[0].lost

    anyio.run(main, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["fabric", "local"])
def test_an_exchange_that_waits_for_a_rank_holds_up_no_other_one(carrier: str) -> None:
    """On rank 0 the first exchange waits for a rank that does not open it; the second one opens and works."""

    async def main() -> None:
        config = MoeConfig(**SMALL)
        async with fabrics_of(2) as fabrics, anyio.create_task_group() as tasks:
            addresses = [fabric.address for fabric in fabrics]
            local = LocalChannels(CARD_CODEC)
            channels = [
                _fabric_channel(each) if carrier == "fabric" else local.open(str(each.address)) for each in fabrics
            ]

            def group(rank: int, tag: str) -> MoeGroup:
                return MoeGroup(rank, addresses, tag, None if carrier == "fabric" else channels[rank])

            async def wait_in_vain() -> None:
                async with open_moe(fabrics[0], group(0, "first"), config):
                    raise AssertionError("opened without the other rank")

            async def second(rank: int) -> None:
                async with open_moe(fabrics[rank], group(rank, "second"), config) as moe:
                    await right_step(moe, 1)

            tasks.start_soon(wait_in_vain)
            theirs: Any = channels[1]
            while not theirs.untaken(str(addresses[0])):
                await theirs._carrier.more(theirs._changed)
            async with anyio.create_task_group() as both:
                both.start_soon(second, 0)
                both.start_soon(second, 1)
            tasks.cancel_scope.cancel()

    anyio.run(main, backend="trio")


@pytest.mark.slow
def test_a_card_waits_for_the_session_with_its_rank() -> None:
    """Channels over links or a store find a rank when it is there: until then it cannot be sent to."""

    async def main() -> None:
        config, local = MoeConfig(**SMALL), LocalChannels(CARD_CODEC)
        async with fabrics_of(2) as fabrics, anyio.create_task_group() as tasks:
            addresses = [fabric.address for fabric in fabrics]
            tried = anyio.Event()

            class Watched(MemberChannel[Card]):
                async def send(self, to: str, message: Card) -> None:
                    try:
                        await super().send(to, message)
                    finally:
                        tried.set()

            async def step(rank: int, channel: CardChannel) -> None:
                async with open_moe(fabrics[rank], MoeGroup(rank, addresses, channel=channel), config) as moe:
                    await right_step(moe, 1)

            first = local.open(str(addresses[0]))
            first.__class__ = Watched
            tasks.start_soon(step, 0, first)
            await tried.wait()
            await step(1, local.open(str(addresses[1])))

    anyio.run(main, backend="trio")


@pytest.mark.slow
def test_a_peer_that_takes_itself_for_another_rank_is_refused() -> None:
    async def main() -> None:
        config = MoeConfig(**SMALL)
        async with fabrics_of(2) as fabrics, anyio.create_task_group() as tasks:
            addresses = [fabric.address for fabric in fabrics]

            async def refused(mine: int) -> None:
                group = MoeGroup(0, [addresses[mine], addresses[1 - mine]])
                with pytest.raises(af.RemoteProtocolError, match=r"ranks \[1\] opened .* as other ranks, \[0\]"):
                    async with open_moe(fabrics[mine], group, config):
                        pass

            tasks.start_soon(refused, 0)
            tasks.start_soon(refused, 1)

    anyio.run(main, backend="trio")

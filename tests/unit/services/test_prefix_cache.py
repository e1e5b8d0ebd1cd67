"""Kept pages of prompts over a real pool: what is found is right, what is needed is given back, no wait is for ever."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from fabrics import open_fake

from asyncfabric.kv import KvLayout, KvPool, open_pool
from asyncfabric.testing import FakeNetwork
from asyncfabric_services.nodes.prefix_cache import PrefixCache
from asyncfabric_services.runner.prefix import PromptBlocks

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, page_tokens=4, dtype="float32")


@asynccontextmanager
async def cache_of(pages: int, *, keeps: bool = True) -> AsyncIterator[tuple[KvPool, PrefixCache]]:
    async with open_fake(FakeNetwork()) as fabric, open_pool(fabric, LAYOUT, pages=pages) as pool:
        cache = PrefixCache(pool, keeps=keeps)
        yield pool, cache
        cache.clear()
        assert (pool.report().free, cache.idle) == (pages, 0)


async def ready(cache: PrefixCache, prompt: list[int]) -> int:
    """Hold a prompt, as one that is computed, and return how many of its tokens were there."""
    async with cache.hold(prompt) as held:
        return held.ready


def test_a_hash_covers_its_block_and_all_before_it() -> None:
    one, other = PromptBlocks(range(20)), PromptBlocks([*range(8), 99, *range(9, 20)])
    assert len(one.of(4)) == 5 and len(one.of(7)) == 2 and one.of(21) == []
    assert one.of(4)[:2] == other.of(4)[:2]
    assert not set(one.of(4)[2:]) & set(other.of(4)[2:])
    assert PromptBlocks([5] * 8).of(4)[0] != PromptBlocks([5] * 8).of(4)[1]
    assert not set(PromptBlocks([5] * 16).of(4)) & set(PromptBlocks([5] * 16).of(8))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        one.of(0)


@pytest.mark.trio
async def test_whole_blocks_are_found_and_the_last_token_is_computed() -> None:
    async with cache_of(16) as (pool, cache):
        assert await ready(cache, list(range(10))) == 0
        assert await ready(cache, list(range(10))) == 8
        assert await ready(cache, list(range(8))) == 4  # its logits come from its last token
        assert await ready(cache, [*range(8), 99, 98, 97, 96, 95]) == 8
        assert await ready(cache, [*range(8), 99, 98, 97, 96, 95]) == 12  # pages of two prompts
        assert await ready(cache, [1, *range(9)]) == 0
        assert pool.report().held == cache.idle
    async with cache_of(16, keeps=False) as (pool, cache):
        await ready(cache, list(range(10)))
        assert await ready(cache, list(range(10))) == 0
        assert pool.report().free == 16


@pytest.mark.trio
async def test_a_prompt_that_was_not_computed_is_not_found() -> None:
    async with cache_of(16) as (pool, cache):
        with pytest.raises(RuntimeError, match="by script"):
            async with cache.hold(list(range(10))):
                raise RuntimeError("by script")
        with trio.CancelScope() as scope:
            async with cache.hold(list(range(10))):
                scope.cancel()
                await trio.sleep_forever()
        assert pool.report().free == 16
        assert await ready(cache, list(range(10))) == 0


@pytest.mark.trio
async def test_room_is_made_from_what_was_used_longest_ago() -> None:
    first, second = [1] * 9, [2] * 9
    async with cache_of(9) as (_, cache):
        await ready(cache, first)
        await ready(cache, second)
        assert await ready(cache, first) == 8  # used again, with a page of its own for the rest: none is free
        assert await ready(cache, [3] * 9) == 0
        assert await ready(cache, first) == 8
        assert await ready(cache, second) == 0


@pytest.mark.trio
async def test_the_beginning_of_a_prompt_outlasts_its_end() -> None:
    chat = list(range(9))
    async with cache_of(8) as (_, cache):
        await ready(cache, chat)  # keeps three pages
        await ready(cache, [*chat, *range(50, 58)])  # three more behind two of them
        assert await ready(cache, [7] * 9) == 0
        assert await ready(cache, [*chat, *range(50, 58)]) == 8


@pytest.mark.trio
async def test_who_waits_for_pages_holds_none(autojump_clock: trio.testing.MockClock) -> None:
    """Two prompts that find all pages of the pool between them, and want more: each would wait for the other's."""
    first, second = [1] * 13, [2] * 13
    async with cache_of(10) as (_, cache):
        await ready(cache, first)
        await ready(cache, second)

        async def use(prompt: list[int]) -> None:
            async with cache.hold(prompt):
                await trio.sleep(1)

        with trio.fail_after(60):
            async with trio.open_nursery() as both, cache.hold([*second, 9, 9, 9, 9]):  # takes the last free pages
                both.start_soon(use, [*first, *range(12)])
                both.start_soon(use, [*second, *range(12)])
                await trio.testing.wait_all_tasks_blocked()


@pytest.mark.trio
@pytest.mark.parametrize("seed", range(9))
async def test_pages_hold_what_they_are_found_for(seed: int, autojump_clock: trio.testing.MockClock) -> None:
    """Prompts of few tokens come, fail and leave in any order: each is computed, and no page has two writers."""
    rnd = random.Random(seed)
    content: dict[int, tuple[int, ...]] = {}  # page -> the tokens from the prompt's beginning to its end
    written: set[int] = set()  # by prompts in progress
    hits = 0
    async with cache_of((7, 12, 40)[seed % 3]) as (pool, cache):

        async def prompt(number: int) -> None:
            nonlocal hits
            await trio.sleep(rnd.random() * 20)
            tokens = [rnd.randrange(2) for _ in range(2)] * 8 + [number] * rnd.randrange(8)
            tokens = tokens[rnd.choice((0, 0, 2)) :] if rnd.random() < 0.9 else [*tokens[:9], number, *tokens[9:]]
            with trio.move_on_after(rnd.choice((0.5, 5, 100))):
                async with cache.hold(tokens) as held:
                    table = held.pages.tolist()
                    assert len(table) == len(set(table)) == -(-len(tokens) // 4)
                    own = table[held.ready // 4 :]
                    assert not written & set(table)
                    for page, end in zip(table, range(4, held.ready + 1, 4), strict=False):
                        assert content[page] == tuple(tokens[:end])
                    hits += held.ready
                    written.update(own)
                    try:
                        for index, page in enumerate(own, held.ready // 4):
                            content[page] = ()
                            await trio.sleep(rnd.random())
                            content[page] = tuple(tokens[: 4 * index + 4])
                        for page, end in zip(table, range(4, held.ready + 1, 4), strict=False):
                            assert content[page] == tuple(tokens[:end])
                    finally:
                        written.difference_update(own)

        with trio.fail_after(10_000):
            async with trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(prompt, number)
        assert pool.report().held == cache.idle and not pool.queue
    assert hits or seed % 3 < 2  # a pool that all wait for keeps nothing

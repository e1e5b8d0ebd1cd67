"""Teller: every row is told once, together with what was written meanwhile, also what is added at the last moment."""

from __future__ import annotations

import anyio

from asyncfabric.weights.update.telling import Teller

Told = list[tuple[str, list[int], list[int], int]]


def test_rows_of_one_moment_are_one_word_for_each_receiver() -> None:
    told: Told = []

    async def tell(*word: object) -> None:
        told.append(word)  # type: ignore[arg-type]

    async def body() -> None:
        teller = Teller(tell)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(teller.run)
            for row in range(3):
                teller.add("a", row, 10 * row, 2 * row)
                await anyio.lowlevel.checkpoint()
            teller.add("b", 3, 30)
            teller.finish()

    anyio.run(body, backend="trio")
    assert told == [("a", [0, 1, 2], [0, 10, 20], 4), ("b", [3], [30], 0)]


def test_what_is_added_while_a_word_is_on_its_way_is_told_before_the_end() -> None:
    told: Told = []

    async def body() -> None:
        speaks, go = anyio.Event(), anyio.Event()

        async def tell(*word: object) -> None:
            told.append(word)  # type: ignore[arg-type]
            speaks.set()
            await go.wait()

        teller = Teller(tell)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(teller.run)
            teller.add("a", 0, 1)
            await speaks.wait()
            teller.add("a", 1, 2)
            teller.finish()
            go.set()

    anyio.run(body, backend="trio")
    assert told == [("a", [0], [1], 0), ("a", [1], [2], 0)]


def test_nothing_to_tell_ends_at_once() -> None:
    async def body() -> None:
        async def tell(*_: object) -> None:
            raise AssertionError("there was nothing to tell")

        teller = Teller(tell)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(teller.run)
            await anyio.lowlevel.checkpoint()
            teller.finish()

    anyio.run(body, backend="trio")

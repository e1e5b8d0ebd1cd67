"""The conductor of expert nodes: how long it waits for whom, and whom it leaves out. Experts state what a test wants.

Nodes, actors and links are the real ones, the network is the fake link and time is a mock clock, so each wait is known.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import trio
import trio.testing
from actor_links import link_opener

from asyncfabric.actors import Actor, Member, handles, open_node
from asyncfabric_services.experts.conductor import Conductor
from asyncfabric_services.experts.messages import EXPERT, LeaveOut, Seated, SeatExpert, Speak, SpokenTokens

pytestmark = pytest.mark.trio
PATIENCE_S = 40.0
PROMPTS = [[1], [2], [3]]
NAMES = ("a", "b", "c")
States = Callable[[int, Speak], SpokenTokens | float]
"""(how often it was asked, what) -> what it states; a number: sends nothing for so many seconds."""


class ScriptedExpert(Actor):
    """Answers each prompt with itself, unless its script states something else."""

    mailbox_capacity: ClassVar[int] = 64

    def __init__(self, states: States) -> None:
        self.asked: list[Speak] = []
        self.left_out: list[list[int]] = []
        self._states = states

    @handles(SeatExpert)
    async def sit(self, message: SeatExpert) -> Seated:
        return Seated(experts=1, most_tokens=8, vocabulary=256, buffer_bytes=0)

    @handles(Speak)
    async def speak(self, message: Speak) -> SpokenTokens:
        self.asked.append(message)
        stated = self._states(len(self.asked), message)
        if isinstance(stated, SpokenTokens):
            return stated
        await trio.sleep(stated)
        return SpokenTokens(tokens=message.prompt)

    @handles(LeaveOut)
    async def leave_out(self, message: LeaveOut) -> None:
        assert message.patience_s == PATIENCE_S
        self.left_out.append(message.ranks)


def well(_: int, message: Speak) -> SpokenTokens:
    return SpokenTokens(tokens=message.prompt)


def missing(*ranks: int) -> States:
    """Miss ranks the first time."""
    return lambda times, message: (
        SpokenTokens(missing=list(ranks), because="late") if times == 1 else well(times, message)
    )


def silent(seconds: float) -> States:
    """State nothing for so long the first time."""
    return lambda times, message: seconds if times == 1 else well(times, message)


@asynccontextmanager
async def conducted(folder: Path, *states: States) -> AsyncIterator[tuple[Conductor, list[ScriptedExpert]]]:
    opener = link_opener("fake", folder)
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(opener("conductor"))
        node = await stack.enter_async_context(open_node("conductor", link))
        members, experts = [], []
        for name, script in zip(NAMES, states, strict=True):
            own = await stack.enter_async_context(opener(name))
            home = await stack.enter_async_context(open_node(name, own))
            expert = ScriptedExpert(script)
            await home.spawn(lambda expert=expert: expert, name=EXPERT)
            experts.append(expert)
            await link.connect(own.address)
            members.append(Member(own.identity, EXPERT, own.address, name.encode()))
        nursery = await stack.enter_async_context(trio.open_nursery())
        conductor = Conductor(node, nursery, members, "group", PATIENCE_S)
        await conductor.seat()
        yield conductor, experts
        nursery.cancel_scope.cancel()


async def test_who_is_missed_by_all_others_has_the_patience_to_state_that_it_lives(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """It is alive and stands still: its link is never lost, and nothing but `patience` ends the wait for it."""
    async with conducted(tmp_path, missing(2), missing(2), silent(10 * PATIENCE_S)) as (conductor, experts):
        began = trio.current_time()
        assert await conductor.generate(PROMPTS, 1) == PROMPTS
        assert trio.current_time() - began == pytest.approx(PATIENCE_S, abs=0.5)
        assert [departure.ranks for departure in conductor.departures] == [(2,)]
        assert conductor.departures[0].seconds == pytest.approx(PATIENCE_S, abs=0.5)
        assert [expert.left_out for expert in experts] == [[[2]], [[2]], []]
        assert {message.patience_s for expert in experts for message in expert.asked} == {PATIENCE_S}
        await trio.sleep(20 * PATIENCE_S)  # it states something at last, and nobody listens any more
        assert await conductor.generate(PROMPTS, 1) == PROMPTS
        assert conductor.present == [0, 1] and len(experts[2].asked) == 1


async def test_who_is_named_and_answers_within_the_patience_stays(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with conducted(tmp_path, missing(1, 2), silent(PATIENCE_S / 2), silent(10 * PATIENCE_S)) as made:
        conductor, experts = made
        assert await conductor.generate(PROMPTS, 1) == PROMPTS
        assert [departure.ranks for departure in conductor.departures] == [(2,)]
        assert conductor.present == [0, 1]
        assert experts[1].left_out == [[2]]


async def test_nobody_is_left_out_while_somebody_whom_nobody_misses_is_silent(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """It may still be in the step, with the one who is missed; it is waited for beyond any patience."""
    async with conducted(tmp_path, missing(2), silent(5 * PATIENCE_S), silent(20 * PATIENCE_S)) as made:
        conductor, _ = made
        began = trio.current_time()
        assert await conductor.generate(PROMPTS, 1) == PROMPTS
        assert trio.current_time() - began == pytest.approx(6 * PATIENCE_S, abs=0.5)
        assert [departure.ranks for departure in conductor.departures] == [(2,)]

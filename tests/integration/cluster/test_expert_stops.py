"""Expert nodes that stand still, and what `patience` bounds: the others name who is late, leave it out, and go on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

for needed in ("torch", "transformers", "hypercorn"):
    pytest.importorskip(needed, reason=f"expert nodes need {needed}")

from cluster import Cluster, bare_cluster  # noqa: E402

from asyncfabric.errors import BrokenError  # noqa: E402
from asyncfabric_services.experts.conductor import Conductor  # noqa: E402
from asyncfabric_services.experts.group import open_conductor, open_group  # noqa: E402
from asyncfabric_services.experts.messages import LeaveOut, SeatExpert, Speak  # noqa: E402
from asyncfabric_services.experts.sparse_model import greedy, load_sparse, mask_experts  # noqa: E402
from asyncfabric_services.settings.schema import ModelSection  # noqa: E402

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0
SOON_S = 1.0
"""A patience that is meant to run out."""
LONG_S = 2 * PATIENCE_S
IDLE_LOOKS = 100
PROMPTS = [list(b"One token after the other."), list(b"Each expert"), list(b"knows a part")]
COUNT = 8
MODEL = ModelSection(layers=3, hidden=64, query_heads=4, kv_heads=2, experts=6)
NODES = ("expert-a", "expert-b", "expert-c")
FORWARDS, MISSED = "asyncfabric_expert_forward_forwards_total", "asyncfabric_expert_missed_steps_total"


def expected(*masked: int) -> list[list[int]]:
    model = load_sparse(MODEL)
    for rank in masked:
        mask_experts(model, range(2 * rank, 2 * rank + 2))
    return [greedy(model, prompt, COUNT) for prompt in PROMPTS]


def missed(made: Cluster, name: str, because: str) -> float:
    lines = made[name].get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f'{MISSED}{{because="{because}"}}'))


def until_over(made: Cluster, name: str) -> None:
    """Wait until a node has found others missing, for whatever reason.

    Or until it has long waited for nothing: who stood still until sessions with it ended, as it may on a busy machine,
    has a call that is cancelled before it can find anybody missing.
    """
    deadline, idle = time.monotonic() + PATIENCE_S, 0
    while not missed(made, name, "lost") + missed(made, name, "late") and idle < IDLE_LOOKS:
        assert time.monotonic() < deadline, made[name].get("/why")
        time.sleep(0.02)
        idle = 0 if json.loads(made[name].get("/why"))["why"] else idle + 1


def until_ready(made: Cluster, name: str) -> None:
    """Wait until a node that stood still is registered again: on a busy machine its directory has given it up."""
    deadline = time.monotonic() + PATIENCE_S
    while (state := json.loads(made[name].get("/health"))["state"]) != "ready":
        assert time.monotonic() < deadline, state
        time.sleep(0.02)


@asynccontextmanager
async def group_of(made: Cluster, patience: float = PATIENCE_S) -> AsyncIterator[Conductor]:
    folder = str(made.folder / "ipc")
    with trio.fail_after(LONG_S):
        async with open_group(made["directory"].link, len(NODES), ipc_folder=folder, patience=patience) as conductor:
            yield conductor


async def stops_and_goes_on(made: Cluster) -> None:
    victim = made["expert-c"]
    async with group_of(made) as conductor:
        assert await conductor.generate(PROMPTS, COUNT) == expected()
        conductor._patience = SOON_S
        answers: list[list[int]] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                answers.extend(await conductor.generate(PROMPTS, COUNT))

            nursery.start_soon(ask)
            done = COUNT + 2  # in the middle of the second answer
            await trio.to_thread.run_sync(victim.until, FORWARDS, lambda forwards: forwards >= done)
            victim.child.send_signal(signal.SIGSTOP)
        assert answers == (expected(2) if conductor.departures else expected()), (
            "either it came too late, or not at all"
        )
        assert await conductor.generate(PROMPTS, COUNT) == expected(2)
        assert [departure.ranks for departure in conductor.departures] == [(2,)]
        assert "rank 2" in conductor.departures[0].because
        for name in NODES[:2]:
            assert made[name].metric("asyncfabric_expert_present_ranks") == 2
        victim.child.send_signal(signal.SIGCONT)
        await trio.to_thread.run_sync(until_over, made, victim.name)  # it ends the step that it was given alone
        await trio.to_thread.run_sync(until_ready, made, victim.name)
        assert await conductor.generate(PROMPTS, COUNT) == expected(2), "what it did since reached nobody"
        assert made["expert-a"].metric(FORWARDS) == made["expert-b"].metric(FORWARDS)
    with pytest.raises(BrokenError, match=r"the node is in group \w+ and let the other experts go; start it anew"):
        async with group_of(made, SOON_S):
            raise AssertionError("a node was in two groups")


async def is_bounded(made: Cluster) -> None:
    """Send to some what all have to get: those wait for the others as long as they are ordered to, and name them."""
    folder, directory = str(made.folder / "ipc"), made["directory"].link
    with trio.fail_after(LONG_S):
        async with open_conductor(directory, len(NODES), ipc_folder=folder, patience=PATIENCE_S) as conductor:
            addresses = [member.fabric_address for member in conductor.members]
            alone = partial(SeatExpert, "alone", addresses=addresses, patience_s=SOON_S)
            answers, failures = await conductor._ask([0, 2], lambda rank: alone(rank=rank), lambda _: False)
            assert answers == {} and failures.keys() == {0, 2}, "rank 1 never came"
            await conductor.seat()  # who gave a seat up takes another
            assert await conductor.generate(PROMPTS, COUNT) == expected()
            spoken, failures = await conductor._ask(
                [0, 1], lambda rank: Speak(PROMPTS[rank], COUNT, SOON_S), lambda _: False
            )
            assert failures == {}
            for answer in spoken.values():
                assert 2 in answer.missing and not answer.lost and answer.tokens == []
                assert "silent until the deadline" in answer.because
            left, failures = await conductor._ask([0], lambda _: LeaveOut([2], SOON_S), lambda _: False)
            assert left == {} and failures.keys() == {0}, "rank 1 was not asked"
            assert "rank 1 silent until the deadline" in failures[0], failures
    for name in NODES[:2]:
        assert missed(made, name, "late") == 1


def test_a_node_that_stops_is_left_out_and_harms_nobody_when_it_goes_on(tmp_path: Path) -> None:
    with bare_cluster(tmp_path, MODEL__EXPERTS="6") as made:
        made.start(*NODES)
        trio.run(stops_and_goes_on, made)
        assert set(made.end(*NODES).values()) == {0}


def test_what_the_others_do_not_do_is_waited_for_no_longer_than_the_patience(tmp_path: Path) -> None:
    with bare_cluster(tmp_path, MODEL__EXPERTS="6") as made:
        made.start(*NODES)
        trio.run(is_bounded, made)

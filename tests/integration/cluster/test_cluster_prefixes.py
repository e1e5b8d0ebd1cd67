"""Chats over four prefill nodes: a router that knows prefixes brings each turn to the pages of the turn before.

Small by default. ASYNCFABRIC_TEST_CHATS=200 is the whole measurement; it prints what it found.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

for needed in ("torch", "transformers", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

import trio  # noqa: E402
from asker import Asker, open_asker  # noqa: E402
from cluster import Cluster, bare_cluster  # noqa: E402
from plain_model import PlainModel  # noqa: E402

from asyncfabric_services.runner.model import ModelChoice  # noqa: E402

pytestmark = pytest.mark.slow
CHATS = int(os.environ.get("ASYNCFABRIC_TEST_CHATS", "8"))
TURNS, ANSWER, TOGETHER, PAGE = 5, 2, min(16, CHATS), 16
HITS, IMBALANCE = (0.8, 1.3) if CHATS >= 100 else (0.7, 1.6)  # few turns are far from their mean
FIRST, MORE = (100, 300), (20, 80)  # tokens of the first turn, and of each later one
PREFILLS = tuple(f"prefill-{number}" for number in range(4))
MODEL = ModelChoice(layers=3, hidden=64, query_heads=4, kv_heads=2, max_tokens=4096)


@dataclass
class Played:
    """What a number of chats found.

    Attributes:
        last: the prompt and the answer of each chat's last turn.
        asked: how many turns each node was asked.
        stayed: of the later turns, those that went to the node of the turn before.
        before: tokens of whole pages of the turns before.
        found, computed: tokens of prompts that nodes had, and that they computed.
    """

    last: list[tuple[list[int], list[int]]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    stayed: int = 0
    before: int = 0
    found: float = 0.0
    computed: float = 0.0

    def share_stayed(self) -> float:
        return self.stayed / (self.asked.total() * (TURNS - 1) / TURNS)

    def imbalance(self) -> float:
        return max(self.asked.values()) * len(PREFILLS) / self.asked.total()

    def __str__(self) -> str:
        return (
            f"{self.asked.total()} turns: {self.share_stayed():.3f} of the later ones went where the one before was, "
            f"{self.found / self.before:.3f} of its tokens were not computed again "
            f"({self.found / (self.found + self.computed):.3f} of all tokens); "
            f"most turns of a node over the mean: {self.imbalance():.2f}"
        )


async def play(asker: Asker, chats: int, seed: str, shared: list[int]) -> Played:
    """Play chats, TOGETHER at a time."""
    played, places = Played(), trio.Semaphore(TOGETHER)

    async def chat(number: int) -> None:
        draws = random.Random(f"{seed} {number}")
        prompt = [*shared, *(draws.randrange(256) for _ in range(draws.randint(*FIRST)))]
        async with places:
            node, tokens = "", 0
            for turn in range(TURNS):
                answer, asked = await asker.answer(prompt, ANSWER)
                played.asked[asked] += 1
                played.stayed += asked == node
                played.before += tokens
                node, tokens = asked, len(prompt) // PAGE * PAGE
                if turn == TURNS - 1:
                    played.last.append((prompt, answer))
                prompt = [*prompt, *answer, *(draws.randrange(256) for _ in range(draws.randint(*MORE)))]

    async with trio.open_nursery() as nursery:
        for number in range(chats):
            nursery.start_soon(chat, number)
    return played


def counted(made: Cluster) -> tuple[float, float]:
    """Return how many tokens of prompts all prefill nodes found, and computed."""
    found = sum(made[name].metric("asyncfabric_prefix_hit_tokens_total") for name in PREFILLS)
    return found, sum(made[name].metric("asyncfabric_prefill_computed_tokens_total") for name in PREFILLS)


async def play_in(made: Cluster, *, by_prefix: bool, shared: list[int]) -> Played:
    folder, address = str(made.folder / "ipc"), made.settings["CLUSTER__DIRECTORY"]
    before = await trio.to_thread.run_sync(counted, made)
    async with open_asker(folder, address, by_prefix=by_prefix) as asker:
        await asker.membership.wait_for("prefill", len(PREFILLS))
        await asker.membership.wait_for("decode", 1)
        played = await play(asker, CHATS, f"{by_prefix} {len(shared)}", shared)
    after = await trio.to_thread.run_sync(counted, made)
    played.found, played.computed = (there - earlier for there, earlier in zip(after, before, strict=True))
    return played


def test_turns_of_a_chat_find_the_pages_of_the_turn_before(tmp_path: Path) -> None:
    """By load alone they do by chance; and no page that is found changes a token."""
    plain, system = PlainModel(MODEL, 4096), [7] * 100
    settings = {"CACHE__MEMORY": "96MiB", "MODEL__MAX_TOKENS": "4096", "CACHE__PAGE_TOKENS": str(PAGE)}
    with bare_cluster(tmp_path, **settings) as made:
        made.start(*PREFILLS, "decode-1")
        by_load = trio.run(lambda: play_in(made, by_prefix=False, shared=[]))
        print(f"by load alone: {by_load}")
        by_prefix = trio.run(lambda: play_in(made, by_prefix=True, shared=system))
        print(f"by prefix: {by_prefix}")
        for prompt, answer in by_prefix.last:
            assert answer == plain.answer(prompt, ANSWER)
        for name in (*PREFILLS, "decode-1"):
            made[name].until_no_page_is_out()
            assert made[name].end() == 0
    assert by_load.share_stayed() < HITS <= by_prefix.share_stayed()
    assert by_prefix.found >= HITS * by_prefix.before
    assert by_prefix.imbalance() <= IMBALANCE

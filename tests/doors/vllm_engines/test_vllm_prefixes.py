"""Chats over four prefill nodes with vLLM's own prefix cache: each turn comes to the blocks of the turn before.

Small by default. ASYNCFABRIC_TEST_CHATS=200 is the whole measurement; it prints what it found.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import ARGUMENTS, ARITHMETIC, DESCRIBED, Cluster, Served, open_cluster, texts_alone

CHATS = int(os.environ.get("ASYNCFABRIC_TEST_CHATS", "8"))
TURNS, ANSWER, TOGETHER, BLOCK_TOKENS = 5, 2, min(16, CHATS), 16
HITS, IMBALANCE = (0.8, 1.3) if CHATS >= 100 else (0.7, 1.6)  # few turns are far from their mean
FIRST, MORE = (100, 300), (20, 80)  # tokens of the first turn, and of each later one
BY_LOAD = "by-load"
PREFILLS = tuple(f"P{number}" for number in range(4))
HIT, SEEN, DONE = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:request_success_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    caching = Served(DESCRIBED, ARGUMENTS | {"enable_prefix_caching": True}, ARITHMETIC.preloaded)
    with open_cluster(list(PREFILLS), ["D"], served=caching, step_s=0.0, blocks=512) as cluster:
        cluster.start("router", BY_LOAD, "--cluster-directory", cluster.link, "--router-routing", "load")
        cluster.ready(BY_LOAD, *PREFILLS, "D")
        yield cluster


class Chats:
    """A number of chats through one router, and what vLLM's own counters have of them.

    Attributes:
        last: each chat's last prompt, and its answer.
        share: of the tokens in whole blocks of the turns before, those that a node still had.
        imbalance: the most turns of a node over the mean.
    """

    def __init__(self, cluster: Cluster, router: str) -> None:
        self._cluster, self._router = cluster, router
        before = self._counted()
        with ThreadPoolExecutor(TOGETHER) as pool:
            played = list(pool.map(self._chat, range(CHATS)))
        hits, seen, done = (
            [there - earlier for there, earlier in zip(after, earlier_ones, strict=True)]
            for after, earlier_ones in zip(self._counted(), before, strict=True)
        )
        self.last = [(prompt, answer) for prompt, answer, _ in played]
        self.share = sum(hits) / sum(tokens for *_, tokens in played)
        self.imbalance = max(done) * len(done) / sum(done)
        print(
            f"{router}: {sum(done):.0f} turns, {self.share:.3f} of the tokens of turns before were found, "
            f"{sum(hits) / sum(seen):.3f} of all; most turns of a node over the mean: {self.imbalance:.2f}"
        )

    def _chat(self, number: int) -> tuple[list[int], str, int]:
        """Play one chat; return its last prompt and answer, and the tokens in whole blocks of the turns before."""
        draws = random.Random(f"{self._router} {number}")
        prompt = [draws.randrange(256) for _ in range(draws.randint(*FIRST))]
        known = 0
        for turn in range(TURNS):
            answer = self._cluster.ask(prompt, ANSWER, router=self._router)
            if turn < TURNS - 1:
                known += len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
                prompt = [*prompt, *(draws.randrange(256) for _ in range(draws.randint(*MORE)))]
        return prompt, answer, known

    def _counted(self) -> list[list[float]]:
        nodes = [self._cluster.nodes[name] for name in PREFILLS]
        return [[node.metric(figure) for node in nodes] for figure in (HIT, SEEN, DONE)]


def test_turns_of_a_chat_find_the_blocks_of_the_turn_before(cluster: Cluster) -> None:
    """By load alone they do by chance; and no block that is found changes a token."""
    by_load, by_prefix = Chats(cluster, BY_LOAD), Chats(cluster, "router")
    some = by_prefix.last[:20]
    assert [answer for _, answer in some] == texts_alone([prompt for prompt, _ in some], ANSWER)
    assert by_load.share < by_prefix.share >= HITS
    assert by_prefix.imbalance <= IMBALANCE
    for name in (*PREFILLS, "D"):
        cluster.nodes[name].emptied()

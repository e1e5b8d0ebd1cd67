"""Greedy answers of prefill and decode processes are one process's, token for token, whatever chunks and pages.

Small by default. ASYNCFABRIC_TEST_TOKEN_PROMPTS=200 is the whole proof: eight pairs of a prefill and a decode node.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest

for needed in ("torch", "transformers", "hypercorn"):
    pytest.importorskip(needed, reason=f"the cluster needs {needed}")

import trio  # noqa: E402
from asker import open_asker  # noqa: E402
from cluster import Cluster, bare_cluster  # noqa: E402
from plain_model import PlainModel  # noqa: E402

from asyncfabric_services.runner.model import ModelChoice  # noqa: E402

pytestmark = pytest.mark.slow
PROMPTS = int(os.environ.get("ASYNCFABRIC_TEST_TOKEN_PROMPTS", "10"))
LONGEST, ANSWER = 2000, 24
TOGETHER = 4  # so that requests of unlike lengths decode in one batch
CLOSE = 1e-3  # logits of the plain model are of other sums, so equal within rounding only; they spread over about 10
MODEL = ModelChoice(layers=8, hidden=128, query_heads=8, kv_heads=4, max_tokens=4096)
SETTINGS = {
    "MODEL__LAYERS": "8",
    "MODEL__HIDDEN": "128",
    "MODEL__QUERY_HEADS": "8",
    "MODEL__KV_HEADS": "4",
    "MODEL__MAX_TOKENS": "4096",
    "CACHE__MEMORY": "96MiB",
}


class Pair(NamedTuple):
    """How a prefill and a decode node are set."""

    chunk_tokens: int
    prefill_page: int
    decode_page: int


PAIRS = (
    Pair(48, 8, 64),  # of the small selection: chunks end inside pages of the decode node
    Pair(16, 8, 8),
    Pair(32, 16, 16),
    Pair(512, 64, 64),
    Pair(100, 64, 8),
    Pair(256, 32, 16),
    Pair(77, 24, 40),
    Pair(300, 13, 61),
)


def prompts_of(pair: Pair, count: int, draws: random.Random) -> list[list[int]]:
    """Return prompts: the lengths at which pages and chunks begin and end, then any."""
    edges = {1, LONGEST}
    for size in pair:
        edges |= {size - 1, size, size + 1}
    chosen = sorted(edges) if count > len(edges) else [*draws.sample(sorted(edges - {LONGEST}), count - 1), LONGEST]
    chosen += [draws.randint(1, LONGEST) for _ in range(count - len(chosen))]
    return [[draws.randrange(256) for _ in range(length)] for length in chosen]


async def answers_of(made: Cluster, pair: Pair, prompts: list[list[int]]) -> list[list[int]]:
    async with open_asker(str(made.folder / "ipc"), made.settings["CLUSTER__DIRECTORY"]) as asker:
        await asker.membership.wait_for("prefill")
        await asker.membership.wait_for("decode")
        return await asker.crowd(prompts, ANSWER, TOGETHER)


def test_every_token_is_that_of_one_process(tmp_path: Path) -> None:
    draws = random.Random(PROMPTS)
    pairs = PAIRS if 4 * len(PAIRS) <= PROMPTS else PAIRS[:1]
    shares = [PROMPTS // len(pairs) + (index < PROMPTS % len(pairs)) for index in range(len(pairs))]
    plain, compared, worst = PlainModel(MODEL, LONGEST + ANSWER), 0, 0.0
    with bare_cluster(tmp_path, **SETTINGS) as made:
        for number, (pair, share) in enumerate(zip(pairs, shares, strict=True)):
            nodes = {
                f"prefill-{number}": {
                    "BATCH__CHUNK_TOKENS": str(pair.chunk_tokens),
                    "CACHE__PAGE_TOKENS": str(pair.prefill_page),
                },
                f"decode-{number}": {"CACHE__PAGE_TOKENS": str(pair.decode_page)},
            }
            made.start_each(nodes)
            prompts = prompts_of(pair, share, draws)
            answers = trio.run(answers_of, made, pair, prompts)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer == plain.answer(prompt, ANSWER), f"{pair}, a prompt of {len(prompt)} tokens"
                worst = max(worst, plain.shortfall(prompt, answer))
                assert worst < CLOSE, f"{pair}, a prompt of {len(prompt)} tokens: the plain model gives something else"
                compared += 1
            for name in nodes:
                made[name].until_no_page_is_out()
                assert made[name].end() == 0
            print(f"{pair}: {share} prompts of {min(map(len, prompts))}..{max(map(len, prompts))} tokens are equal")
    assert compared == PROMPTS
    print(f"{compared} prompts, {compared * ANSWER} tokens; worst distance from the plain model's choice: {worst:.2e}")

"""Models, pools and prompts for the tests of the runner, the batcher and the router."""

from __future__ import annotations

import random
from functools import cache

import torch

from asyncfabric_services.runner.model import TINY, LoadedModel, ModelChoice, load_model
from asyncfabric_services.runner.page_supply import FreeList
from asyncfabric_services.runner.runner import Runner
from asyncfabric_services.runner.sampling import Sampling
from asyncfabric_services.runner.scheduler import ScheduledRequest, Scheduler

torch.set_num_threads(1)  # the matrices are small, and threads that wait for a shared core make it slower

POISON = 0xFF  # NaN in every dtype: a page that was not written cannot go unnoticed


@cache
def tiny(page_tokens: int = 16) -> LoadedModel:
    return load_model(TINY, page_tokens=page_tokens)


def make_runner(page_tokens: int = 16, pages: int = 320, choice: ModelChoice = TINY) -> Runner:
    """Return a runner over memory that it does not own, poisoned."""
    loaded = tiny(page_tokens) if choice == TINY else load_model(choice, page_tokens=page_tokens)
    memory = torch.full((loaded.shape.pool_bytes(pages),), POISON, dtype=torch.uint8)
    return Runner(loaded, loaded.shape.view(memory, pages))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draws = random.Random(f"{seed} {length}")
    return [draws.randrange(256) for _ in range(length)]


def table_of(length: int, page_tokens: int, pages: int = 320, seed: int = 0) -> list[int]:
    """Return scattered pages, enough for `length` tokens."""
    return random.Random(seed).sample(range(pages), -(-length // page_tokens))


def make_scheduler(pages: int = 320, page_tokens: int = 16, **limits: int) -> tuple[Scheduler, FreeList]:
    supply = FreeList(pages)
    chosen = {"chunk_tokens": 64, "most_running": 8, "most_waiting": 1000} | limits
    return Scheduler(supply, page_tokens=page_tokens, **chosen), supply


def member_of(prompt: list[int], max_tokens: int, **options: object) -> ScheduledRequest:
    return ScheduledRequest(list(prompt), max_tokens, Sampling(), **options)  # type: ignore[arg-type]


def alone(runner: Runner, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the greedy answer of a scheduler that holds nothing else."""
    scheduler, _ = make_scheduler(runner.pool.shape[1], runner.loaded.shape.page_tokens, chunk_tokens=10_000)
    member = member_of(prompt, max_tokens)
    scheduler.join(member)
    while not member.finished:
        plan = scheduler.plan()
        scheduler.complete(plan, runner.step([span for _, span in plan]))
    scheduler.leave(member)
    return member.tokens[len(prompt) :]

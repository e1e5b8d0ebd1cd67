"""Plays the scenario, computes the right answers, judges: the command `asyncfabric demo kv`, and its signals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import trio

from asyncfabric_services.demo.cluster.load import LoadRequest
from asyncfabric_services.demo.cluster.one_process import OneProcess
from asyncfabric_services.demo.cluster.report import show, summarize
from asyncfabric_services.demo.cluster.scenario import asks_of, play
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.exits import CHECK_FAILED, FINE
from asyncfabric_services.interruption import guarded
from asyncfabric_services.runner.model import ModelChoice


def run_cluster_demo(settings: DemoSettings, *, requests: int, clients: int, as_json: bool) -> int:
    """Run the demo and show what became of it; return the exit status."""
    began = time.monotonic()

    def report(text: str) -> None:
        if not as_json:
            print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    asks = asks_of(settings.new_tokens)
    observed, status = trio.run(guarded, partial(play, settings, asks, requests, clients, report))
    if observed is None:
        return status
    report("every answer is compared with the same model in one process")
    summary = summarize(settings, observed, expected_answers(settings, asks), time.monotonic() - began)
    show(summary, as_json=as_json)
    return FINE if summary.fine else CHECK_FAILED


def expected_answers(settings: DemoSettings, asks: Sequence[LoadRequest]) -> dict[LoadRequest, str]:
    """Return the answers of the same model in one process; blocking."""
    torch.set_num_threads(settings.threads)
    path = Path(settings.model) if settings.model else None
    choice = ModelChoice(path=path, layers=settings.layers, hidden=settings.hidden, seed=settings.seed)
    longest = max(len(ask.prompt.encode()) + 8 + ask.max_tokens for ask in asks)
    one_process = OneProcess(choice, settings.page_tokens, longest)
    return {ask: one_process.answer(ask) for ask in asks}

"""Plays the scenario, computes the right answers, judges: the command's side of `asyncfabric demo moe`."""

from __future__ import annotations

import time
from functools import partial

import trio

from asyncfabric_services.demo.moe.one_process import right_answers
from asyncfabric_services.demo.moe.report import show, summarize
from asyncfabric_services.demo.moe.scenario import play
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.exits import CHECK_FAILED, FINE
from asyncfabric_services.interruption import guarded


def run_moe_demo(settings: DemoSettings, *, as_json: bool) -> int:
    """Run the demo and show what became of it; return the exit status."""
    began = time.monotonic()

    def report(text: str) -> None:
        if not as_json:
            print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    observed, status = trio.run(guarded, partial(play, settings, report))
    if observed is None:
        return status
    report("every answer is compared with the same model in one process")
    summary = summarize(settings, observed, *right_answers(settings), time.monotonic() - began)
    show(summary, as_json=as_json)
    return FINE if summary.fine else CHECK_FAILED

"""Plays the scenario, compares every version, judges: the command's side of `asyncfabric demo weights`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import trio

from asyncfabric_services.demo.weights.report import show, summarize
from asyncfabric_services.demo.weights.scenario import Scenario, play
from asyncfabric_services.demo.weights.verdict import Usual
from asyncfabric_services.exits import CHECK_FAILED, FINE, UNFIT
from asyncfabric_services.interruption import guarded
from asyncfabric_services.trainer.checkpoints import KEPT


def run_weights_demo(scenario: Scenario, *, as_json: bool) -> int:
    """Run the demo and show what became of it; return the exit status."""
    if scenario.device == "cuda":  # a GPU for each trainer
        if not torch.cuda.is_available():
            print("--device cuda: torch sees no GPU; see asyncfabric doctor", file=sys.stderr)
            return UNFIT
        scenario = replace(scenario, trainers=min(scenario.trainers, torch.cuda.device_count()))
    began = time.monotonic()

    def report(text: str) -> None:
        if not as_json:
            print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    with TemporaryDirectory(prefix="asyncfabric-") as name:
        folder = Path(name)
        observed, status = trio.run(guarded, partial(play, scenario, folder, report))
        if observed is None:
            return status
        report("every version that served is compared with its checkpoint, loaded the usual way")
        torch.set_num_threads(scenario.threads)
        usual = Usual(folder / "checkpoints", folder / "decisions")
        try:
            summary = summarize(scenario, observed, usual, time.monotonic() - began)
        except OSError as error:
            print(f"a version that served cannot be compared: {error}; trainers keep the last {KEPT}", file=sys.stderr)
            return CHECK_FAILED
    show(summary, as_json=as_json)
    return FINE if summary.fine else CHECK_FAILED

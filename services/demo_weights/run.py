"""Plays the story, compares every version, judges: the command's side of `asyncfabric demo weights`; its signals."""

from __future__ import annotations

import signal
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import trio

from asyncfabric.errors import BrokenError
from asyncfabric_services.demo_weights.report import show, summarize
from asyncfabric_services.demo_weights.story import Say, Scene, Told, play
from asyncfabric_services.demo_weights.verdict import Usual
from asyncfabric_services.exits import CHECK_FAILED, FINE
from asyncfabric_services.interruption import first_failure, run_interruptible


def run_weights_demo(scene: Scene, *, as_json: bool) -> int:
    """Run the demo and show what became of it; return the exit status."""
    began = time.monotonic()

    def say(text: str) -> None:
        if not as_json:
            print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    with TemporaryDirectory(prefix="asyncfabric-") as name:
        folder = Path(name)
        told, status = trio.run(_guarded, scene, folder, say)
        if told is None:
            return status
        say("every version that served is compared with its checkpoint, loaded the usual way")
        torch.set_num_threads(scene.threads)
        usual = Usual(folder / "checkpoints", folder / "decisions")
        summary = summarize(scene, told, usual, time.monotonic() - began)
    show(summary, as_json=as_json)
    return FINE if summary.fine else CHECK_FAILED


async def _guarded(scene: Scene, folder: Path, say: Say) -> tuple[Told | None, int]:
    """Play until done, failed or interrupted; returns what was told, or None and the exit status."""
    failure: BaseException | None = None
    told: Told | None = None
    caught: signal.Signals | None = None
    try:
        told, caught = await run_interruptible(partial(play, scene, folder, say))
    except* BrokenError as group:
        failure = first_failure(group)
    if failure is not None:
        print(failure, file=sys.stderr)
        return None, CHECK_FAILED
    if told is None and caught is not None:
        print(f"interrupted by {caught.name}", file=sys.stderr)
        return None, 128 + caught
    return told, FINE

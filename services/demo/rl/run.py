"""Plays the demo, shows the curve, compares every version with its checkpoint: the side of `asyncfabric demo rl`."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from asyncfabric.weights import ReplicaLayout
from asyncfabric_services.demo.rl.engine import serve
from asyncfabric_services.demo.rl.task import advantages, model_config, rewards
from asyncfabric_services.demo.rl.trainer import RANKS, train
from asyncfabric_services.exits import CHECK_FAILED, FINE, UNFIT
from asyncfabric_services.rollout.fingerprint import bytes_digest, logits_digest
from asyncfabric_services.rollout.fused_model import FusedModel
from asyncfabric_services.rollout.usual import load_usual
from asyncfabric_services.trainer.checkpoints import KEPT, load_version

STEPS_OF_VERSION = 2
LEAST_GAIN = 0.2
"""By how much the mean reward of the last quarter is above that of the first."""
PATIENCE_S = 300.0
BAR = 40


@dataclass(frozen=True, slots=True)
class Learning:
    """What the demo plays: rail, versions, threads of each process."""

    provider: str = "local"
    versions: int = 16
    threads: int = 1


class LearningSummary(msgspec.Struct, frozen=True):
    """What came of it: mean reward with each version, and versions whose bytes or logits were not the checkpoint's."""

    demo: str
    provider: str
    versions: int
    compared: int
    wrong_bits: int
    rewards: list[float]
    gain: float
    seconds: float
    fine: bool


class PartEnded(Exception):
    """A process of the demo ended before its time."""


def run_learning_demo(learning: Learning, *, as_json: bool) -> int:
    """Run the demo and show what became of it; return the exit status."""
    if learning.versions > KEPT:
        print(f"--versions: at most {KEPT}, so many checkpoints are kept")
        return UNFIT
    began = time.monotonic()

    def report(text: str) -> None:
        if not as_json:
            print(text, flush=True)

    with TemporaryDirectory(prefix="asyncfabric-") as name:
        try:
            curve, served = play(learning, Path(name), report)
        except PartEnded as error:
            print(f"the demo ended early: {error}")
            return CHECK_FAILED
        wrong = sum(served[version] != usual_digests(Path(name), version) for version in served)
    quarter = max(1, len(curve) // 4)
    gain = sum(curve[-quarter:]) / quarter - sum(curve[:quarter]) / quarter
    fine = not wrong and gain >= LEAST_GAIN
    summary = LearningSummary(
        "rl",
        learning.provider,
        learning.versions,
        len(served),
        wrong,
        [round(one, 4) for one in curve],
        round(gain, 4),
        round(time.monotonic() - began, 3),
        fine,
    )
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        report(
            f"reward {curve[0]:.2f} -> {curve[-1]:.2f}; {len(served)} versions: bytes and logits of "
            f"{len(served) - wrong} are, bit for bit, those of their checkpoint loaded the usual way"
        )
    return FINE if fine else CHECK_FAILED


def play(
    learning: Learning, folder: Path, report: Callable[[str], None]
) -> tuple[list[float], dict[int, tuple[str, str]]]:
    """Train for all versions; return the mean reward with each, and digests of what served.

    Raises:
        PartEnded: a process ended, or did not answer.
    """
    curve: list[float] = []
    served: dict[int, tuple[str, str]] = {}
    with parts(learning, folder) as (engine, trainers):
        for version in range(1, learning.versions + 1):
            for one in trainers:
                one.send(("publish", version))
            engine.send(("version", version))
            for one in trainers:
                answer_of(one)
            served[version] = answer_of(engine)
            means = []
            for step in range(STEPS_OF_VERSION):
                engine.send(("generate", version * STEPS_OF_VERSION + step))
                tokens = answer_of(engine)
                reward = rewards(tokens)
                means.append(float(reward.mean()))
                for one in trainers:
                    one.send(("step", tokens, advantages(reward)))
                for one in trainers:
                    answer_of(one)
            curve.append(sum(means) / len(means))
            report(f"version {version:3}  reward {curve[-1]:.3f}  {'#' * round(BAR * curve[-1])}")
    return curve, served


def usual_digests(folder: Path, version: int) -> tuple[str, str]:
    """Return the digests of bytes and logits of a checkpoint that is loaded the usual way."""
    torch.set_num_threads(1)
    model = FusedModel(model_config(), ReplicaLayout())
    ranks = load_usual(load_version(folder, version), model.card, model.layout)
    return bytes_digest(ranks), logits_digest(model, ranks)


def answer_of(pipe: Connection) -> Any:
    """Return the next answer of a process; raises PartEnded for one that ended, or that takes too long."""
    try:
        if not pipe.poll(PATIENCE_S):
            raise PartEnded(f"a process did not answer for {PATIENCE_S:g} s")
        return pipe.recv()
    except (EOFError, ConnectionError):
        raise PartEnded("a process ended before its time; its error is above") from None


@contextmanager
def parts(learning: Learning, folder: Path) -> Iterator[tuple[Connection, list[Connection]]]:
    """Run the ranks of the training and the engine; they end with the block."""
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []

    def start(target: Any, *arguments: Any) -> Connection:
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        return mine

    rail, threads = {"tcp": "tcp:lo"}.get(learning.provider, learning.provider), learning.threads
    try:
        first = start(train, 0, 0, rail, threads, folder)
        port = answer_of(first)
        others = [start(train, number, port, rail, threads, folder) for number in range(1, RANKS)]
        engine = start(serve, port, rail, threads)
        yield engine, [first, *others]
        engine.send(("end", 0))
        started[-1].join(PATIENCE_S)
        for one in (first, *others):
            one.send(("end", 0))
        for one in (first, *others):
            answer_of(one)
    finally:
        for process in started:
            process.kill()
            process.join()

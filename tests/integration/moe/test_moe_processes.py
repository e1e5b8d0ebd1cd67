"""Exchanges between real processes: right to the bit over each rail, the same over all, and a rank that is killed."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import Any

import pytest
from availability import need
from processes import Process

STEPS = int(os.environ.get("ASYNCFABRIC_MOE_STEPS", "10"))
PATIENCE_S = 90.0 + STEPS

SHAPE: dict[str, Any] = {"num_experts": 10, "top_k": 4, "hidden": 256, "max_tokens": 48, "private_tokens": 16}
SHAPES: tuple[dict[str, Any], ...] = ({}, {"node_size": 2, "in_dtype": "float8_e4m3fn", "scale_block": 64})

pytestmark = pytest.mark.slow


def all_of(processes: list[Process], do: str, **arguments: Any) -> list[dict[str, Any]]:
    for process in processes:
        process.send(do=do, **arguments)
    answers = [process.receive(PATIENCE_S) for process in processes]
    assert not any("error" in answer for answer in answers), answers
    return answers


def join(processes: list[Process], rail: str, shape: dict[str, Any], **options: Any) -> None:
    addresses = [each["address"] for each in all_of(processes, "open", rail=rail, options=options)]
    for number, process in enumerate(processes):
        process.send(do="join", rank=number, addresses=addresses, config=SHAPE | shape | {"ranks": len(processes)})
    answers = [process.receive(PATIENCE_S) for process in processes]
    assert not any("error" in answer for answer in answers), answers


def test_steps_are_right_and_have_the_same_bits_over_all_rails() -> None:
    need("local", "tcp")
    with ExitStack() as stack:
        processes = [stack.enter_context(Process("moe_rank.py")) for _ in range(4)]
        for shape in SHAPES:
            digests = []
            for rail in ("local", "tcp"):
                join(processes, rail, shape)
                answers = all_of(processes, "steps", first=0, count=STEPS)
                assert [answer["wrong"] for answer in answers] == [0] * 4
                digests.append([answer["digest"] for answer in answers])
                all_of(processes, "leave")
            assert digests[0] == digests[1]
        for process in processes:
            process.close(PATIENCE_S)


def test_a_killed_rank_is_named_and_the_others_go_on_without_it() -> None:
    """Over local three ranks lose the one in the middle; the two that are left meet again over tcp and lose another."""
    need("local", "tcp")
    with ExitStack() as stack:
        processes = [stack.enter_context(Process("moe_rank.py")) for _ in range(3)]
        for rail in ("local", "tcp"):
            # A machine that is busy elsewhere must not look like a peer that is silent.
            join(processes, rail, {}, peer_deadline_network=10.0)
            all_of(processes, "steps", first=0, count=2)
            others = [processes[0], *processes[2:]]
            for process in others:
                process.send(do="until_missing")
            processes[1].send_signal(signal.SIGKILL)
            for process in others:
                assert process.receive(PATIENCE_S) == {"ranks": [1], "lost": True}
            present = [rank for rank in range(len(processes)) if rank != 1]
            assert all(answer["present"] == present for answer in all_of(others, "exclude", ranks=[1]))
            answers = all_of(others, "steps", first=100, count=STEPS)
            assert [answer["wrong"] for answer in answers] == [0] * len(others)
            all_of(others, "leave")
            processes = others
        for process in processes:
            process.close(PATIENCE_S)

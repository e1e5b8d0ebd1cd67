"""Ring 2: random programs over shuffled, late and split rails never break INV-1, INV-2 or INV-3.

Over the native engine behind fault rails, and over the fake engine whose network holds and shuffles what was posted.
"""

from __future__ import annotations

import functools
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariant_machine import run_program
from random_programs import Step, programs

import asyncfabric as af
from asyncfabric.testing import FakeEngine, FakeNetwork

shapes = st.fixed_dictionaries(
    {
        "rails": st.integers(1, 3),
        "target_rails": st.integers(1, 3),
        "seed": st.integers(1, 1000),
        "reorder": st.sampled_from((0, 4, 64)),
        "delay_us": st.sampled_from((0, 0, 150)),
        "busy_every": st.sampled_from((0, 0, 7)),
    }
)
PROGRAMS = settings(max_examples=20)  # each is some dozens of ops, most of them in flight together


@functools.cache
def _native_missing() -> str:
    async def attempt() -> None:
        async with af.open_fabric(af.FabricConfig(rails=("fault+local",))):
            pass

    try:
        anyio.run(attempt, backend="trio")
    except (af.DeviceError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run_native(program: list[Step], shape: dict[str, int]) -> None:
    if reason := _native_missing():
        pytest.skip(f"the native engine cannot be opened here: {reason}")

    def opener(count: int, salt: int) -> Any:
        rails = tuple(
            f"fault+local?seed={shape['seed'] + salt + number}&reorder={shape['reorder']}"
            f"&delay_us={shape['delay_us']}&busy_every={shape['busy_every']}"
            for number in range(count)
        )
        config = af.FabricConfig(rails=rails, stripe_bytes=4096, drain_deadline=5.0)
        return functools.partial(af.open_fabric, config)

    anyio.run(
        run_program,
        opener(shape["rails"], 0),
        opener(shape["target_rails"], 100),
        program,
        shape["seed"],
        backend="trio",
    )


def _run_fake(program: list[Step], shape: dict[str, int]) -> None:
    """Each turn of the loop delivers one of the requests that the network holds."""
    network = FakeNetwork(hold=True, seed=shape["seed"] if shape["reorder"] else None, window=8, request_bytes=20_000)

    @asynccontextmanager
    async def open_fabric() -> Any:
        config = af.FabricConfig(rails=("local",) * shape["rails"], stripe_bytes=4096)
        factory = functools.partial(FakeEngine, network=network)
        async with af.open_fabric(config, engine_factory=factory) as fabric:
            yield fabric

    async def deliver() -> None:
        while True:
            network.deliver(1)
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(deliver)
            await run_program(open_fabric, open_fabric, program, shape["seed"])
            tasks.cancel_scope.cancel()

    anyio.run(main, backend="trio")


@PROGRAMS
@given(programs(), shapes)
def test_native_counts_and_cancellation(program: list[Step], shape: dict[str, int]) -> None:
    _run_native(program, shape)


@PROGRAMS
@given(programs(revokes=True), shapes)
def test_native_revocation(program: list[Step], shape: dict[str, int]) -> None:
    _run_native(program, shape)


@PROGRAMS
@given(programs(), shapes)
def test_fake_counts_and_cancellation(program: list[Step], shape: dict[str, int]) -> None:
    _run_fake(program, shape)


@PROGRAMS
@given(programs(revokes=True), shapes)
def test_fake_revocation(program: list[Step], shape: dict[str, int]) -> None:
    _run_fake(program, shape)

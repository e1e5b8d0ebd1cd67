"""What this machine lets ring 5 do; what is missing is named and skipped, loudly."""

from __future__ import annotations

import functools
import os
import subprocess

import anyio
import pytest

import asyncfabric as af


@functools.cache
def missing(rail: str) -> str:
    """Return why a rail cannot be opened here, or nothing."""

    async def attempt() -> None:
        async with af.open_fabric(af.FabricConfig(rails=(rail,))):
            pass

    try:
        anyio.run(attempt, backend="trio")
    except (af.DeviceError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def need_time_for_demos() -> None:
    """Skip, loudly, where nobody asked for the demos that other tests cover piece by piece."""
    if not os.environ.get("ASYNCFABRIC_TEST_DEMOS"):
        pytest.skip("a demo takes most of a minute: ASYNCFABRIC_TEST_DEMOS=1 runs it")


def need(*rails: str) -> None:
    """Skip, loudly, where a rail cannot be opened."""
    for rail in rails:
        if reason := missing(rail):
            pytest.skip(f"rail {rail} cannot be opened here: {reason}")


@functools.cache
def namespaces_missing() -> str:
    """Return why network namespaces cannot be made here, or nothing."""
    try:
        result = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
        probe = subprocess.run(["ip", "-V"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"{error}"
    return "" if result.returncode == 0 and probe.returncode == 0 else result.stderr.strip() or "ip is missing"

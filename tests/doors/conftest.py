"""What the tests against foreign packages share: the two faces of NIXL, and no check for what foreign packages keep.

Runs in the environment of `make doors`; a package that is missing fails its tests, which are about nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from faces import FACES, Face, open_face
from two_agents import TwoAgents

STATUS = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Pass what LMCache does as it is imported beside OpenTelemetry, which has it deprecated."""
    config.addinivalue_line("filterwarnings", "ignore:.LoggingHandler. in .opentelemetry-sdk. is deprecated")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep the status for the end of the process."""
    session.config.stash[STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave at once: NIXL 1.5.1 crashes among the destructors of its libraries, after one agent already."""
    if "nixl_cu13._bindings" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash.get(STATUS, 1))


@pytest.fixture(autouse=True)
def leaks_nothing() -> Iterator[None]:
    """Replace the check of other rings: UCX, Ray and others keep threads, sockets and files until the process ends."""
    yield


@pytest.fixture(scope="session", params=FACES)
def face(request: pytest.FixtureRequest) -> Face:
    """Return the real NIXL and then ours: each test of behaviour runs on both."""
    return open_face(request.param)


@pytest.fixture(scope="module")
def acquainted(face: Face) -> Iterator[TwoAgents]:
    """Return two agents of this process that know each other; opening them costs more than a test."""
    with TwoAgents(face) as found:
        yield found


@pytest.fixture
def two(acquainted: TwoAgents) -> TwoAgents:
    """Return them with new bytes and without notes, for tests that leave what they know as it was."""
    acquainted.renew()
    return acquainted


@pytest.fixture
def fresh(face: Face) -> Iterator[TwoAgents]:
    """Return two agents for one test alone, which may change what they know."""
    with TwoAgents(face) as found:
        yield found

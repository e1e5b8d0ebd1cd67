"""What every test of the project gets: a check that it leaked nothing, a watchdog, and both event loops.

A leaked thread, file descriptor, shared-memory file or child process fails the test that leaked it, so the next test
is never blamed. Async tests carry `@pytest.mark.anyio` and run under trio and under asyncio.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# A shell lets background jobs ignore SIGINT, and Python leaves it so: tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Children print their stacks when they are ordered to abort; see _dump_process_tree.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

_WATCHDOG_S = float(os.environ.get("ASYNCFABRIC_TEST_WATCHDOG_S", "240"))
_SETTLE_S = 3.0
_KEPT_THREADS = ("Trio thread", "AnyIO worker", "watchdog", "pytest_timeout", "tokio", "asyncio_")
_FIRST = ("integration", "conformance", "soak", "property")  # of the rings; within a ring the order of the files
_OWN_TASKS = ("af-", "af_", "afabric", "asyncfabric")  # names of native threads, as in /proc/self/task/*/comm


def pytest_configure(config: pytest.Config) -> None:
    """Set hypothesis up; name the markers too, so that one directory of tests runs alone with strict markers."""
    # A loaded machine makes examples slow, not wrong; the watchdog and pytest-timeout bound a test as a whole.
    hypothesis.settings.register_profile("asyncfabric", deadline=None)
    hypothesis.settings.load_profile("asyncfabric")
    config.addinivalue_line("markers", "slow: takes more than 0.25 s; runs in `make test` all the same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the rings with the longest files first, so that processes which share the files out end together."""
    items.sort(key=lambda item: _FIRST.index(ring) if (ring := item.path.parent.name) in _FIRST else len(_FIRST))


def pytest_collection_finish() -> None:
    """Spare the garbage collector torch, transformers and thousands of tests: a tenth of the time of small tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each async test under both event loops."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def loaded_driver() -> None:
    """Load the NVIDIA driver where there is one: descriptors that it keeps for good are no leak of the first test."""
    with contextlib.suppress(OSError, ImportError):
        ctypes.CDLL("libcuda.so.1")
        import torch

        for ordinal in range(torch.cuda.device_count()):
            for other in range(torch.cuda.device_count()):
                torch.zeros(1, device=f"cuda:{ordinal}").to(f"cuda:{other}")
        multiprocessing.resource_tracker.ensure_running()


@pytest.fixture(autouse=True)
def leaks_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test when something that it made is still there after it."""
    before = _belongings()
    yield
    deadline = time.monotonic() + _SETTLE_S
    while left := _belongings_since(before):
        if time.monotonic() > deadline:
            pytest.fail(f"{request.node.name} leaked: " + ", ".join(sorted(left)), pytrace=False)
        gc.collect()
        threading.Event().wait(0.005)  # a thread that was asked to end needs a moment to be gone from /proc


@pytest.fixture(autouse=True)
def watchdog(leaks_nothing: None) -> Iterator[None]:
    """Print the stacks of this process and of its children when a test hangs."""
    timer = threading.Timer(_WATCHDOG_S, _dump_process_tree)
    timer.name, timer.daemon = "watchdog", True
    timer.start()
    yield
    timer.cancel()
    timer.join()


def _dump_process_tree() -> None:
    print(f"\n=== a test runs for more than {_WATCHDOG_S} s", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    for child in _children():
        os.kill(child, signal.SIGABRT)


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:
            continue  # the thread ended while we looked, or the kernel does not list children
    return found


def _belongings() -> set[str]:
    found = {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue
        if name.startswith(_OWN_TASKS):
            found.add(f"native thread {name} ({task.name})")
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"fd {entry.name} -> {entry.readlink()}")
        except OSError:
            continue  # the fd of this very listing
    found.update(f"shared memory {path}" for path in Path("/dev/shm").glob("*") if str(os.getpid()) in path.name)
    found.update(f"child process {pid}" for pid in _children())
    return found


def _belongings_since(before: set[str]) -> set[str]:
    left = _belongings() - before
    return {one for one in left if not one.startswith(tuple(f"thread {name}" for name in _KEPT_THREADS))}

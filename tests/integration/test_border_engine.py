"""The compiled border's lifetimes: closing under other threads, spins to interrupt, views that outlive releases.

Against the real engine over the local rail, without the layers above. The calls themselves are tested by the unit
ring, which runs on the fake and on this engine alike.
"""

from __future__ import annotations

import array
import gc
import inspect
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncfabric._bridge.engine import Completion, CompletionKind, Engine, EngineStatusError, StatusKind
from asyncfabric.config import FabricConfig
from asyncfabric.testing import FakeEngine

native = pytest.importorskip("asyncfabric._native", reason="THE BORDER WAS NOT TESTED: run `make build`")

PATIENCE_S = 20.0
FAR_NS = 60_000_000_000


@pytest.fixture
def engine() -> Iterator[Any]:
    opened = native.Engine(FabricConfig(rails=("local",)))
    yield opened
    opened.close()


def completion_of(engine: Any, cookie: int) -> Completion:
    """Poll until the completion with this cookie came."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for one in engine.poll(64):
            if one.cookie == cookie:
                assert isinstance(one, Completion)
                return one
    raise AssertionError(f"no completion {cookie} within {PATIENCE_S} s")


def allocated(engine: Any, length: int) -> int:
    """Allocate a region and return its id."""
    engine.submit_allocate(11, length, -1, 3)
    done = completion_of(engine, 11)
    assert (done.kind, done.code) == (CompletionKind.CONTROL, 0)
    return done.value


def run_program(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        timeout=6 * PATIENCE_S,  # Python itself starts in a second or two under ThreadSanitizer
        capture_output=True,
        text=True,
    )


def test_what_was_built_is_reported() -> None:
    info = native.build_info()
    assert info["version"]
    assert "local" in info["providers"]
    assert info["compiler"].split()[0] in ("GCC", "Clang", "clang")
    assert info["glibc"].startswith("2.")
    assert info["sanitize"] == os.environ.get("ASYNCFABRIC_EXPECT_SANITIZE", "")


def test_a_rail_that_cannot_be_opened_is_named_with_the_reason() -> None:
    with pytest.raises(EngineStatusError, match="carrier-pigeon") as caught:
        native.Engine(FabricConfig(rails=("carrier-pigeon",)))
    assert caught.value.status_kind == StatusKind.DEVICE


def test_a_view_outlives_release_and_close(engine: Any) -> None:
    region = allocated(engine, 3 * 4096 + 5)
    view = engine.region_memory(region)
    assert (len(view), view.readonly) == (3 * 4096 + 5, False)
    view[:5], view[-5:] = b"first", b"final"
    twin = np.frombuffer(engine.region_memory(region), np.uint8)
    assert bytes(twin[:5]) == b"first"
    engine.submit_release(12, region)
    assert completion_of(engine, 12).code == 0
    assert bytes(view[:5]) + bytes(view[-5:]) == b"firstfinal"
    engine.close()
    del engine
    gc.collect()
    view[0:1] = b"F"
    assert bytes(twin[:5]) == b"First"


def test_views_give_their_pages_back(engine: Any) -> None:
    region = allocated(engine, 1 << 20)
    view = engine.region_memory(region)
    mapped = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])

    def is_mapped() -> bool:
        with open("/proc/self/maps") as maps:
            return any(line.startswith(f"{mapped:x}-") for line in maps)

    assert is_mapped()
    del view
    gc.collect()
    assert not is_mapped()


def test_registered_memory_has_no_view_of_its_own(engine: Any) -> None:
    owner = bytearray(8192)
    found = native.resolve_buffer(owner)
    engine.submit_register(13, found.address, found.length_bytes, found.device, 0)
    region = completion_of(engine, 13).value
    with pytest.raises(EngineStatusError, match="only allocated regions"):
        engine.region_memory(region)
    assert engine.region_info(region)[:3] == (found.address, 8192, -1)
    engine.submit_release(14, region)
    assert completion_of(engine, 14).code == 0


def test_close_ends_the_spin_of_another_thread(engine: Any) -> None:
    counter, _ = engine.open_counter(-1)
    began, ended = threading.Event(), []

    def spin() -> None:
        began.set()
        try:
            engine.spin_counter(counter, 1, time.monotonic_ns() + FAR_NS)
        except EngineStatusError as refused:
            ended.append(refused.status_kind)

    spinner = threading.Thread(target=spin)
    spinner.start()
    began.wait()
    engine.close()
    spinner.join(PATIENCE_S)
    assert ended == [StatusKind.CLOSED]


CLOSED_UNDER_CALLS = """
import itertools, threading, time
import numpy as np
from asyncfabric._native import Engine
from asyncfabric._bridge.engine import EngineStatusError, StatusKind
from asyncfabric.config import FabricConfig
from asyncfabric.testing import FakeEngine

PAGES = np.zeros(2_000_000, np.int64)  # such a call is long enough to be in the middle when close() comes

for round in range(12):
    engine = Engine(FabricConfig(rails=("local",)))
    engine.submit_allocate(1, 4096, -1, 3)
    while not (done := engine.poll(1)):
        pass
    region = done[0].value
    key, _ = engine.open_key(engine.region_key(region, 1, 0, 4096))
    counter, _ = engine.open_counter(-1)
    under_way, refused = threading.Semaphore(0), []

    def look():
        engine.statistics()
        engine.poll(16)

    def write():
        engine.submit_write_pages(2, region, PAGES, key, PAGES, 8, 8, 8, 0, 0, -1)

    def spin():
        engine.spin_counter(counter, 1, time.monotonic_ns() + 60_000_000_000)

    def repeat(call):
        try:
            for turn in itertools.count():
                if turn == (call is not spin):  # a spin does not come back
                    under_way.release()
                call()
        except EngineStatusError as error:
            refused.append(error.status_kind)

    callers = [threading.Thread(target=repeat, args=(call,)) for call in (look, write, spin)]
    for caller in callers:
        caller.start()
    for caller in callers:
        under_way.acquire()
    engine.close()
    for caller in callers:
        caller.join()
    assert refused == [StatusKind.CLOSED] * 3, refused
"""


@pytest.mark.slow
def test_calls_of_many_threads_survive_close() -> None:
    # Freed memory is filled with garbage, so that a call inside a destroyed engine does not get away with it.
    done = run_program(CLOSED_UNDER_CALLS, MALLOC_PERTURB_="170")
    assert done.returncode == 0, done.stderr


def test_a_spin_ends_at_its_deadline_and_not_before(engine: Any) -> None:
    counter, _ = engine.open_counter(-1)
    began = time.monotonic_ns()
    with pytest.raises(EngineStatusError) as caught:
        engine.spin_counter(counter, 1, began + 120_000_000)
    assert time.monotonic_ns() - began >= 120_000_000
    assert caught.value.status_kind == StatusKind.TRANSFER


def test_ctrl_c_interrupts_a_spin(engine: Any) -> None:
    counter, _ = engine.open_counter(-1)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        # A compiled call has no frame of its own: the main thread spins when its newest frame is the one that calls it.
        while "spin_counter" not in linecache.getline(__file__, sys._current_frames()[main].f_lineno):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.spin_counter(counter, 1, time.monotonic_ns() + 5_000_000_000)
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)


def test_a_closed_engine_refuses_every_call(engine: Any) -> None:
    engine.close()
    engine.close()
    calls = [
        engine.address,
        engine.rails,
        engine.statistics,
        engine.step,
        engine.arm,
        lambda: engine.take_messages(1),
        lambda: engine.spin_messages(1, 0),
        lambda: engine.poll(1),
        lambda: engine.open_counter(-1),
        engine.open_watch,
        lambda: engine.submit_allocate(1, 4096, -1, 0),
        lambda: engine.submit_write(1, 1, 0, 1, 1, 0, -1),
        lambda: engine.submit_send(1, 1, b"x"),
        lambda: engine.cancel(1),
        lambda: engine.region_info(1),
    ]
    for call in calls:
        with pytest.raises(EngineStatusError) as caught:
            call()
        assert caught.value.status_kind == StatusKind.CLOSED
    assert engine.closed and "closed" in repr(engine)


def test_watch_words_are_refused_once_closed(engine: Any) -> None:
    watch, address = engine.open_watch()
    assert address and engine.watch_load(watch) == 0
    engine.arm_watch(watch, 15, 0)
    engine.watch_store(watch, 77)
    assert completion_of(engine, 15).value == 77
    engine.close_watch(watch)
    engine.close_watch(watch)
    for call in (engine.watch_load, lambda one: engine.watch_store(one, 1), lambda one: engine.arm_watch(one, 1, 0)):
        with pytest.raises(EngineStatusError):
            call(watch)


def test_page_lists_must_be_int64_buffers_of_one_length(engine: Any) -> None:
    pages = np.arange(8, dtype=np.int64)

    def write(source: object, target: object) -> None:
        engine.submit_write_pages(1, 1, source, 1, target, 4096, 4096, 4096, 0, 0, -1)

    with pytest.raises(ValueError, match="8 source pages but 5 target pages"):
        write(pages, pages[:5])
    with pytest.raises(ValueError, match="int64"):
        write(pages.astype(np.int32), pages)
    with pytest.raises(ValueError, match="contiguous"):
        write(pages[::2], pages[::2])
    with pytest.raises(TypeError):
        write([1, 2], [1, 2])
    with pytest.raises(EngineStatusError):  # well formed, and then refused by the engine: there is no such region
        write(array.array("q", [1]), array.array("q", [1]))


def test_the_compiled_engine_and_the_fake_have_the_calls_of_the_protocol() -> None:
    """Type checkers cannot look into compiled code: names, their order, and what may be left out."""
    calls = {name: call for name, call in vars(Engine).items() if callable(call) and not name.startswith("_")}
    assert "submit_read_pages" in calls
    for name, call in calls.items():
        wanted = [(one.name, one.default) for one in inspect.signature(call).parameters.values()]
        for kind in (native.Engine, FakeEngine):
            had = [(one.name, one.default) for one in inspect.signature(getattr(kind, name)).parameters.values()]
            assert had[: len(wanted)] == wanted, f"{kind}.{name}"
            assert all(default is not inspect.Parameter.empty for _, default in had[len(wanted) :]), f"{kind}.{name}"


def test_an_engine_is_opened_once(engine: Any) -> None:
    with pytest.raises(RuntimeError):
        engine.__init__(FabricConfig(rails=("local",)))


@pytest.mark.slow
def test_a_forked_child_leaves_the_engine_alone(engine: Any) -> None:
    program = (
        "import os, sys; from asyncfabric._native import Engine; from asyncfabric.config import FabricConfig\n"
        "engine = Engine(FabricConfig(rails=('local',)))\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    engine.close(); del engine; os._exit(7)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "engine.statistics(); engine.close()\n"
        "sys.exit(os.waitstatus_to_exitcode(status) != 7)\n"
    )
    done = run_program(program)
    assert done.returncode == 0, done.stderr

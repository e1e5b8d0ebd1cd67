"""Recording running nodes: taps on a fabric, clocks of other hosts, one recording at a time, and the command."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette", reason="nodes need starlette")

import trio
import trio.testing
from click.testing import CliRunner
from fabrics import LENGTH, open_pair
from hypothesis import given
from hypothesis import strategies as st
from look_site import site
from starlette.requests import Request

from asyncfabric import TraceEvent
from asyncfabric.errors import BusyError
from asyncfabric.observe.spans import Span, SpanRing
from asyncfabric.observe.tap import TraceTap
from asyncfabric.observe.trace import Recording, boot_id, merge
from asyncfabric_services.cli import asyncfabric
from asyncfabric_services.trace.clocks import Reading, best_of, on_one_clock
from asyncfabric_services.trace.recorder import Recorder


@pytest.mark.trio
async def test_a_tap_takes_each_event_once_and_counts_what_it_missed() -> None:
    async with open_pair() as p:
        p.writer.set_trace(True)
        await p.writer.write(p.source[:8], p.key, 0)
        tap = TraceTap(p.writer.take_trace)
        tap.drain()
        assert list(tap.events) == [], "what was before is not taken"
        for length in (1, 2, 3):
            await p.writer.write(p.source[:length], p.key, 0)
            tap.drain()
            tap.drain()
        assert [event.value for event in tap.events if event.what == "finish"] == [1, 2, 3]
        assert tap.gaps == 0
        for _ in range(4200):  # more than the ring keeps
            await p.writer.write(p.source[:4], p.key, 0)
        tap.drain()
        assert tap.gaps == 1
        assert len(tap.events) == len(set(tap.events))


def _tapped(steps: list[tuple[int, bool]], ring: int) -> tuple[TraceTap, list[TraceEvent]]:
    """Write events and tap them; `steps` are the times between events, and whether the tap is drained after them."""
    now, written = 100, list[TraceEvent]()
    tap = TraceTap(lambda: written[-ring:], since_ns=100)
    for number, (pause, drained) in enumerate(steps):
        now += pause
        written.append(TraceEvent(now, "post", number, 0))
        if drained:
            tap.drain()
    tap.drain()
    return tap, written


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60))
def test_events_of_one_moment_are_taken_once_each(steps: list[tuple[int, bool]]) -> None:
    tap, written = _tapped(steps, 64)
    assert (list(tap.events), tap.gaps) == (written, 0)


@given(st.lists(st.tuples(st.integers(1, 2), st.booleans()), max_size=60), st.integers(1, 8))
def test_what_a_short_ring_lost_is_a_gap(steps: list[tuple[int, bool]], ring: int) -> None:
    tap, written = _tapped(steps, ring)
    taken = [event.subject for event in tap.events]
    assert taken == sorted(set(taken)) and taken[-ring:] == [event.subject for event in written[-ring:]]
    assert tap.gaps >= sum(after - before > 1 for before, after in pairwise(taken))


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1))
def test_an_offset_is_never_more_wrong_than_it_states(true_ns: int, ways: list[tuple[int, int]]) -> None:
    """`ways` are the times to the node and back; the node is ahead of us by `true_ns`."""
    now, readings = 1000, []
    for there, back in ways:
        readings.append(Reading("far", now, now + there + back, now + there + true_ns))
        now += there + back + 7
    best = best_of(readings)["far"]
    assert abs(best.offset_ns - true_ns) <= best.error_ns
    assert best.error_ns == min(reading.error_ns for reading in readings)


def test_recordings_of_other_hosts_are_laid_on_our_clock() -> None:
    def recording(host: str, begin_ns: int, wall_offset_ns: int) -> Recording:
        span = Span(name="x", begin_ns=begin_ns, end_ns=begin_ns + 10)
        return Recording(name=host, host=host, wall_offset_ns=wall_offset_ns, events=[], spans=[span])

    # The far host's clock is 5,000 ahead of ours and its wall clock is wrong by an hour; nobody asked the third.
    given_ = [recording("here", 100, 7), recording("far", 5300, 3_600_000_000_000), recording("lost", 200, 900)]
    laid = on_one_clock(given_, best_of([Reading("far", 0, 40, 5020), Reading("far", 0, 10, 5005)]), "here", 900)
    assert [one.clock_error_ns for one in laid] == [0, 5, 0]
    slices = {one["pid"]: one["ts"] for one in merge(laid)["traceEvents"] if one["ph"] == "X"}
    assert slices == {1: 0.0, 2: 0.2, 3: 0.1}


@pytest.mark.trio
async def test_a_recorder_is_off_before_and_after_and_makes_one_recording_at_a_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ring = SpanRing()
    made: list[Recording] = []
    recorder = Recorder("router", ring)

    async def record() -> None:
        made.append(await recorder.record(5))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(record)
        await trio.testing.wait_all_tasks_blocked()
        assert ring.on
        with pytest.raises(BusyError, match="another recording"):
            await recorder.record(1)
        with ring.open("request"):
            pass
        nursery.start_soon(trio.sleep, 1)
    assert trio.current_time() == pytest.approx(5)
    assert ([span.name for span in made[0].spans], made[0].events, ring.on) == (["request"], [], False)
    with trio.move_on_after(1):
        await recorder.record(5)
    assert not ring.on
    assert (await recorder.record(1)).spans == []


@pytest.mark.trio
async def test_a_recorder_switches_the_trace_of_its_fabric_on_and_off() -> None:
    async with open_pair() as p:
        recorder = Recorder("decode", SpanRing(), p.writer)
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                for length in range(1, 9):
                    await p.writer.write(p.source[:length], p.key, 0)

            nursery.start_soon(write)
            recording = await recorder.record(0.02)
        finished = [event.value for event in recording.events if event.what == "finish"]
        assert finished == list(range(1, 9))
        await p.writer.write(p.source[: LENGTH // 2], p.key, 0)
        assert all(event.value != LENGTH // 2 for event in p.writer.take_trace()), "it is off again"


@pytest.mark.trio
async def test_what_a_node_answers_about_its_recording(autojump_clock: trio.testing.MockClock) -> None:
    recorder = Recorder("router", SpanRing())
    trace, clock = (route.endpoint for route in recorder.routes())

    def ask(seconds: str) -> Any:
        return trace(Request({"type": "http", "query_string": f"seconds={seconds}".encode()}))

    answers: list[Any] = []
    async with trio.open_nursery() as nursery:

        async def first() -> None:
            answers.append(await ask("60s"))

        nursery.start_soon(first)
        await trio.testing.wait_all_tasks_blocked()
        busy = await ask("1s")
        assert (busy.status_code, "another recording" in json.loads(busy.body)["error"]) == (409, True)
        for wrong in ("", "0s", "61s", "soon", "-1s"):
            refused = await ask(wrong)
            assert (refused.status_code, "seconds: " in json.loads(refused.body)["error"]) == (400, True)
    assert (answers[0].status_code, json.loads(answers[0].body)["name"]) == (200, "router")
    reported = json.loads((await clock(None)).body)
    assert reported["host"] == boot_id() and 0 < reported["monotonic_ns"] <= time.monotonic_ns()


def _answer(recording: Recording) -> bytes:
    return msgspec.json.encode(recording)


def test_the_command_lays_a_far_node_on_our_clock_and_writes_one_picture(tmp_path: Path) -> None:
    ahead_ns = 10**15
    now = time.monotonic_ns()
    near = Span(name="request", begin_ns=now, end_ns=now + 10_000_000_000, trace="a" * 32, id="1" * 16)
    far = Span(name="answer", begin_ns=now + 5_000_000_000 + ahead_ns, end_ns=now + 6_000_000_000 + ahead_ns)
    here = Recording(name="router", host=boot_id(), wall_offset_ns=1, events=[], spans=[near])
    there = Recording(name="decode/1", host="far", wall_offset_ns=2, events=[], spans=[far])
    with site(trace=_answer(here)) as first, site(trace=_answer(there)) as second:
        first.answers["/clock"] = lambda: {"host": boot_id(), "monotonic_ns": time.monotonic_ns()}
        second.answers["/clock"] = lambda: {"host": "far", "monotonic_ns": time.monotonic_ns() + ahead_ns}
        places = ["--node", first.url, "--node", second.url]
        options = ["--seconds", "250ms", "-o", str(tmp_path / "t.json"), "--keep", str(tmp_path / "kept")]
        ended = CliRunner().invoke(asyncfabric, ["trace", "record", *places, *options], standalone_mode=False)
    assert (ended.exception, ended.return_value) == (None, 0)
    assert "2 spans and 0 events of 2 nodes" in ended.stdout
    assert "/trace?seconds=0.250000s" in first.asked
    slices = {one["name"]: one for one in _picture(tmp_path / "t.json") if one["ph"] == "X"}
    kept = [Recording.load(path) for path in sorted((tmp_path / "kept").iterdir())]
    assert [path.name for path in sorted((tmp_path / "kept").iterdir())] == ["0-router.json", "1-decode_1.json"]
    error_us = kept[1].clock_error_ns / 1000
    assert abs(slices["answer"]["ts"] - slices["request"]["ts"] - 5e6) <= error_us + 1
    assert 0 < error_us < 4e6


def _picture(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


@pytest.mark.parametrize(
    ("clock", "trace", "reason"),
    [
        ({"host": 1}, b"{}", "does not report its clock"),
        ([1], b"{}", "does not report its clock"),
        ({"host": "h", "monotonic_ns": 5}, b"{}", "no recording"),
        ({"host": "h", "monotonic_ns": 5}, (409, {"error": "another recording"}), "another recording"),
    ],
)
def test_a_node_without_a_recording_is_reported(tmp_path: Path, clock: Any, trace: Any, reason: str) -> None:
    with site(clock=clock if isinstance(clock, dict) else [clock], trace=trace) as node:
        arguments = ["trace", "record", "--node", node.url, "--seconds", "1ms", "-o", str(tmp_path / "t.json")]
        ended = CliRunner().invoke(asyncfabric, arguments, standalone_mode=False)
    assert getattr(ended.exception, "exit_code", 0) == 3
    assert reason in ended.stderr
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("seconds", ["0s", "61s", "soon"])
def test_a_recording_has_an_end(tmp_path: Path, seconds: str) -> None:
    arguments = ["trace", "record", "--node", "a:1", "--seconds", seconds, "-o", str(tmp_path / "t.json")]
    ended = CliRunner().invoke(asyncfabric, arguments, standalone_mode=False)
    assert getattr(ended.exception, "exit_code", 0) == 2

"""Traces: recordings travel by file, and several become one picture on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fabrics import open_pair
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric import TraceEvent
from asyncfabric.observe.spans import Span
from asyncfabric.observe.trace import Recording, merge
from asyncfabric_services.trace.command import trace


def _recording(*events: TraceEvent, name: str = "a", host: str = "h", offset: int = 0) -> Recording:
    return Recording(name=name, host=host, wall_offset_ns=offset, events=list(events))


def _drawn(picture: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in picture["traceEvents"] if event["ph"] == phase]


def test_a_transfer_goes_from_start_to_finish() -> None:
    picture = merge([_recording(TraceEvent(5000, "start", 7, 64), TraceEvent(9000, "finish", 7, 64))])
    (begin,), (end,) = _drawn(picture, "b"), _drawn(picture, "e")
    assert (begin["ts"], end["ts"]) == (0, 4)
    assert begin["id"] == end["id"]
    assert begin["args"] == {"bytes": 64}
    assert json.loads(json.dumps(picture)) == picture


def test_what_had_not_ended_reports_it_and_what_began_too_early_is_left_out() -> None:
    events = (TraceEvent(10, "finish", 1, 0), TraceEvent(20, "start", 2, 8), TraceEvent(90, "post", 0, 3))
    picture = merge([_recording(*events)])
    (begin,), (end,) = _drawn(picture, "b"), _drawn(picture, "e")
    assert end["id"] == begin["id"]
    assert end["args"] == {"unfinished": True}
    assert end["ts"] == 0.08


def test_arrivals_add_up_for_each_imm_and_sleep_has_a_length() -> None:
    reported = [TraceEvent(1, "arrival", 5, 2), TraceEvent(2, "arrival", 6, 1), TraceEvent(3, "arrival", 5, 3)]
    picture = merge([_recording(*reported, TraceEvent(4000, "sleep", 0, 10), TraceEvent(9000, "wake", 0, 0))])
    counted = [(event["name"], event["args"]["counted"]) for event in _drawn(picture, "C")]
    assert counted == [("imm 5", 2), ("imm 6", 1), ("imm 5", 5)]
    (asleep,) = _drawn(picture, "X")
    assert asleep["dur"] == 5


def test_one_host_has_one_clock_and_other_hosts_are_shifted() -> None:
    here = _recording(TraceEvent(1000, "start", 1, 0), offset=10_000)
    beside = _recording(TraceEvent(3000, "start", 1, 0), name="b", offset=99_999)  # taken later: its offset drifted
    far = _recording(TraceEvent(500, "start", 1, 0), name="c", host="other", offset=20_500)
    times = {event["pid"]: event["ts"] for event in _drawn(merge([here, beside, far]), "b")}
    assert times == {1: 0, 2: 2, 3: 10}


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["start", "finish", "sleep", "wake"]), st.integers(0, 3)))
)
def test_every_begin_has_one_end(rows: list[tuple[int, Any, int]]) -> None:
    picture = merge([_recording(*(TraceEvent(time, what, subject, 0) for time, what, subject in rows))])
    open_now: set[str] = set()
    for event in picture["traceEvents"]:
        if event["ph"] == "b":
            assert event["id"] not in open_now
            open_now.add(event["id"])
        elif event["ph"] == "e":
            open_now.remove(event["id"])
    assert open_now == set()


@pytest.mark.anyio
async def test_a_fabric_is_recorded_saved_and_merged(tmp_path: Path) -> None:
    async with open_pair() as p:
        p.writer.set_trace(True)
        p.reader.set_trace(True)
        counter = p.reader.counter()
        await p.writer.write(p.source[:64], p.key, 0, imm=counter.imm)
        Recording.of(p.writer, "writer").save(tmp_path / "w.json")
        Recording.of(p.reader, "reader").save(tmp_path / "r.json")
        with pytest.raises(ValueError, match="needs a name"):
            Recording.of(p.writer, "")
    output = tmp_path / "both.json"
    files = [str(tmp_path / "w.json"), str(tmp_path / "r.json")]
    assert CliRunner().invoke(trace, ["merge", *files, "-o", str(output)]).exit_code == 0
    picture = json.loads(output.read_text())
    assert [event["args"] for event in _drawn(picture, "b")] == [{"bytes": 64}]
    assert [event["name"] for event in _drawn(picture, "C")] == [f"imm {counter.imm}"]
    assert {event["args"]["name"] for event in _drawn(picture, "M")} >= {"writer", "reader"}


def test_pictures_are_merged_again(tmp_path: Path) -> None:
    span = Span(name="route", begin_ns=3000, end_ns=4000)
    first = [
        _recording(TraceEvent(1000, "start", 1, 8), TraceEvent(2000, "finish", 1, 8), offset=10_000),
        Recording(name="router", host="other", wall_offset_ns=9_000, events=[], spans=[span], clock_error_ns=20),
    ]
    second = _recording(TraceEvent(3000, "start", 1, 0), name="b", offset=99_999)
    picture, alone, both = (tmp_path / name for name in ("picture.json", "alone.json", "both.json"))
    picture.write_text(json.dumps(merge(first)))
    second.save(alone)
    ended = CliRunner().invoke(trace, ["merge", str(picture), str(alone), "-o", str(both)])
    assert ended.exit_code == 0, ended.output
    assert json.loads(both.read_text()) == json.loads(json.dumps(merge([*first, second])))
    assert "1 spans and 3 events of 3 processes" in ended.output


@pytest.mark.parametrize(
    ("text", "reason"),
    [("nonsense", "is no recording"), ("{}", "is no recording"), ("[1]", "is no recording")],
)
def test_files_that_are_no_recordings_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=reason):
        Recording.load(tmp_path / "x.json")
    ended = CliRunner().invoke(trace, ["merge", str(tmp_path / "x.json"), "-o", str(tmp_path / "y.json")])
    assert (ended.exit_code, "is no recording" in ended.output) == (2, True)


def test_recordings_of_other_versions_are_refused(tmp_path: Path) -> None:
    Recording(name="a", host="h", wall_offset_ns=0, events=[], version=9).save(tmp_path / "x.json")
    with pytest.raises(ValueError, match="version 9"):
        Recording.load(tmp_path / "x.json")

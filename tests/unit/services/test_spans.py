"""Spans: rings that keep the newest while they are on, W3C contexts, lanes of a picture, arrows between processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric import TraceEvent
from asyncfabric.observe.lanes import place
from asyncfabric.observe.spans import MOST_STATE, Span, SpanRing, TraceContext, new_context, parse_context, read_context
from asyncfabric.observe.trace import Recording, merge

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = f"00-{TRACE}-{PARENT}-01"


def test_a_ring_that_is_off_keeps_nothing_and_hands_the_context_on() -> None:
    ring = SpanRing()
    with ring.open("request", CONTEXT) as span:
        assert span.context == CONTEXT
    ring.add("stream", CONTEXT, 5)
    assert ring.take() == [] and not ring.running


def test_spans_are_children_of_those_that_they_were_opened_in() -> None:
    ring = SpanRing()
    ring.on = True
    with ring.open("request", CONTEXT, request="r1") as outer:
        outer.note(status=200)
        with ring.open("attempt", outer.context) as inner:
            ring.add("stream", inner.context, 5, bytes=64)
    stream, attempt, request = ring.take()
    assert {span.trace for span in (stream, attempt, request)} == {TRACE}
    assert (request.parent, attempt.parent, stream.parent) == (PARENT, request.id, attempt.id)
    assert request.args == {"request": "r1", "status": 200} and stream.args == {"bytes": 64}
    assert request.begin_ns <= attempt.begin_ns <= attempt.end_ns <= request.end_ns
    assert (stream.begin_ns, ring.take()) == (5, [])


def test_what_failed_and_what_still_runs_reports_it() -> None:
    ring = SpanRing()
    ring.on = True
    with pytest.raises(KeyError), ring.open("bad"):
        raise KeyError("x")
    with ring.open("long"):
        failed, running = ring.take()
        assert running.end_ns >= running.begin_ns
    assert failed.args == {"ended_by": "KeyError"} and running.args == {"unfinished": True}
    assert [span.args for span in ring.take()] == [{}], "it is whole in the next recording"


def test_a_span_that_began_before_the_recording_is_in_it() -> None:
    ring = SpanRing()
    with ring.open("long", CONTEXT):
        ring.on = True
    (span,) = ring.take()
    assert (span.name, span.trace, span.parent) == ("long", TRACE, PARENT)


def test_only_the_newest_are_kept() -> None:
    ring = SpanRing(most=3)
    ring.on = True
    for number in range(5):
        ring.add(str(number), "", number)
    assert [span.name for span in ring.take()] == ["2", "3", "4"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{PARENT}",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\n",
        f"00-{TRACE[:-1]}-{PARENT}-01",
    ],
)
def test_what_is_no_trace_context(text: str) -> None:
    assert parse_context(text) is None


def test_trace_contexts_of_this_and_later_versions() -> None:
    assert parse_context(CONTEXT) == (TRACE, PARENT, 1, "")
    assert parse_context(f"01-{TRACE}-{PARENT}-03-later") == (TRACE, PARENT, 3, "")
    made = {new_context() for _ in range(8)}
    assert len(made) == 8 and all(parse_context(one.text()) == one for one in made)


def test_what_a_request_brings_fits_into_every_message() -> None:
    assert read_context(CONTEXT, "a=1,\t, b=2") == CONTEXT, "a tab is no part of it"
    assert read_context(CONTEXT, "a=1, ,b=2") == f"{CONTEXT} a=1,b=2"
    assert read_context(f"{CONTEXT} a=1") == read_context("", "a=1") == ""
    assert read_context(f"01-{TRACE}-{PARENT}-01-{'x' * 600}") == CONTEXT, "a later version is passed on as ours"
    short, long = [f"k{number}={'v' * 40}" for number in range(12)], f"long={'v' * 200}"
    kept = parse_context(read_context(CONTEXT, ",".join([short[0], long, *short[1:]])))
    assert kept is not None and kept.state == ",".join(short[:10]) and len(kept.state) <= MOST_STATE
    assert read_context(CONTEXT, ",".join(["a=1"] * 33)) == CONTEXT


class _Taking:
    """Exports into a list; new traces are sampled or not."""

    def __init__(self, sampling: bool = True) -> None:
        self.taken: list[tuple[Span, TraceContext]] = []
        self._sampling = sampling

    def samples(self, trace: str) -> bool:
        return self._sampling

    def export(self, span: Span, context: TraceContext) -> None:
        self.taken.append((span, context))


def test_an_exporter_takes_spans_of_sampled_traces_alone_and_the_ring_keeps_none() -> None:
    ring = SpanRing()
    ring.exporter = taking = _Taking()
    with ring.open_request("request", f"{CONTEXT} a=1") as outer, ring.open("attempt", outer.context) as inner:
        assert inner.recorded and ring.active
    with ring.open("request", CONTEXT[:-1] + "0") as silent, ring.open("no trace"):
        assert (silent.context, silent.recorded) == (CONTEXT[:-1] + "0", False)
    (attempt, its), (request, given_) = taking.taken
    assert (request.trace, request.parent, given_.state) == (TRACE, PARENT, "a=1")
    assert (attempt.parent, its.span, its.state) == (request.id, request.id, "a=1")
    assert ring.take() == []


@pytest.mark.parametrize("sampling", [True, False])
def test_a_request_without_a_trace_is_the_first_span_of_one(sampling: bool) -> None:
    ring = SpanRing()
    ring.exporter = taking = _Taking(sampling)
    with ring.open_request("request", "") as first:
        context = parse_context(first.context)
    assert context is not None and context.sampled is sampling
    assert [(span.trace, span.id, span.parent) for span, _ in taking.taken] == [
        (context.trace, context.span, "")
    ] * sampling


_TIMES = st.tuples(st.integers(0, 40), st.integers(0, 20), st.sampled_from(["a", "b", ""]))


@given(st.lists(_TIMES, max_size=40))
def test_slices_of_a_lane_lie_inside_one_another_or_apart(rows: list[tuple[int, int, str]]) -> None:
    spans = [Span(name="x", begin_ns=begin, end_ns=begin + length, trace=trace) for begin, length, trace in rows]
    placed = place(spans, 1, 0)
    assert sorted(one.span.begin_ns for one in placed) == sorted(span.begin_ns for span in spans)
    for index, one in enumerate(placed):
        for other in placed[index + 1 :]:
            if one.lane != other.lane:
                continue
            apart = one.end_ns <= other.begin_ns or other.end_ns <= one.begin_ns
            nested = one.begin_ns <= other.begin_ns and other.end_ns <= one.end_ns
            assert apart or (nested and one.span.trace == other.span.trace)


def _recording(name: str, *spans: Span, events: list[TraceEvent] | None = None, **more: Any) -> Recording:
    fields = {"host": "h", "wall_offset_ns": 0} | more
    return Recording(name=name, events=events or [], spans=list(spans), **fields)


def test_a_picture_has_slices_and_an_arrow_from_process_to_process() -> None:
    parent = Span(name="request", begin_ns=1000, end_ns=9000, trace=TRACE, id="1" * 16, args={"tokens": 8})
    child = Span(name="answer", begin_ns=3000, end_ns=7000, trace=TRACE, id="2" * 16, parent="1" * 16)
    beside = Span(name="attempt", begin_ns=2000, end_ns=8000, trace=TRACE, id="3" * 16, parent="1" * 16)
    events = [TraceEvent(500, "start", 1, 64), TraceEvent(600, "finish", 1, 64)]
    picture = merge([_recording("router", parent, beside), _recording("decode-1", child, events=events)])
    slices = {one["name"]: one for one in picture["traceEvents"] if one["ph"] == "X"}
    assert (slices["request"]["ts"], slices["request"]["dur"], slices["answer"]["ts"]) == (0.5, 8, 2.5)
    assert slices["request"]["args"] == {"tokens": 8, "trace": TRACE, "span": "1" * 16, "parent": ""}
    assert slices["request"]["tid"] == slices["attempt"]["tid"], "one lies inside the other"
    leaves, comes = ([one for one in picture["traceEvents"] if one["ph"] == phase] for phase in "sf")
    assert [(one["pid"], one["ts"]) for one in leaves + comes] == [(1, 2.5), (2, 2.5)]
    assert leaves[0]["id"] == comes[0]["id"]
    assert json.loads(json.dumps(picture)) == picture


def test_what_is_unsure_is_in_the_name_of_its_process() -> None:
    picture = merge([_recording("far", clock_error_ns=2500, gaps=3), _recording("near")])
    names = [one["args"]["name"] for one in picture["traceEvents"] if one["name"] == "process_name"]
    assert names == ["far (clock +- 2.5 us, events lost 3 times)", "near"]
    assert [one for one in picture["traceEvents"] if one["name"] == "thread_name"] == [], "there is nothing on a track"

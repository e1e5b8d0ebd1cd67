"""Admission, metrics, health and logs: what a node reports about itself, and whom it lets in."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("starlette", reason="the router needs starlette")

import trio
import trio.testing
from prometheus_client import CollectorRegistry

from asyncfabric_services.health.condition import Condition
from asyncfabric_services.health.logs import open_log
from asyncfabric_services.health.metrics import BoundedCounter, exposition, gauge
from asyncfabric_services.router.admission import RequestAdmission
from asyncfabric_services.router.fault import ApiFault


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    for handler in set(root.handlers) - set(before):
        root.removeHandler(handler)
    root.setLevel(level)


def test_labels_cannot_grow() -> None:
    registry = CollectorRegistry()
    counter = BoundedCounter(registry, "router", "requests_total", "Requests.", status=("200", "404"))
    for status in ["200", "404", *(str(number) for number in range(1000, 2000))]:
        counter.add(status=status)
    lines = [line for line in exposition(registry).decode().splitlines() if line.startswith("asyncfabric_router_req")]
    values = dict(line.split() for line in lines if "_created" not in line)
    assert values == {
        'asyncfabric_router_requests_total{status="200"}': "1.0",
        'asyncfabric_router_requests_total{status="404"}': "1.0",
        'asyncfabric_router_requests_total{status="other"}': "1000.0",
    }
    with pytest.raises(ValueError, match="expected the labels"):
        counter.add(state="200")


def test_what_was_never_counted_reads_0() -> None:
    registry = CollectorRegistry()
    BoundedCounter(registry, "router", "retries_total", "Retries.", because=("lost", "busy"), by=("node",))
    text = exposition(registry).decode()
    for because in ("lost", "busy"):
        assert f'asyncfabric_router_retries_total{{because="{because}",by="node"}} 0.0' in text


@pytest.mark.parametrize("name", ["Router", "router-requests", "", "a__b", "1a"])
def test_names_have_one_form(name: str) -> None:
    with pytest.raises(ValueError, match="no part of a metric's name"):
        gauge(CollectorRegistry(), name, "requests", "Text.")


def test_two_registries_do_not_know_each_other() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    gauge(first, "node", "pages", "Pages.").set(5)
    gauge(second, "node", "pages", "Pages.").set(7)
    assert "asyncfabric_node_pages 5.0" in exposition(first).decode()


def test_json_lines_are_json_with_their_fields(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    open_log("info", "json", stream)
    log = logging.getLogger("asyncfabric.test")
    log.info("a %s", "message", extra={"fields": {"request": "r1", "level": "spoofed"}})
    log.debug("not this")
    try:
        raise KeyError("lost\nkey")
    except KeyError:
        log.exception("it failed")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 2
    assert lines[0].items() >= {"level": "info", "message": "a message", "request": "r1"}.items()
    assert "KeyError" in lines[1]["error"]
    with pytest.raises(ValueError, match="log level must be"):
        open_log("loud", "json", stream)


def test_text_lines_carry_the_fields_too(root_logger: logging.Logger) -> None:
    stream = io.StringIO()
    open_log("info", "text", stream)
    logging.getLogger("asyncfabric.test").warning("hm", extra={"fields": {"requests": 3}})
    assert stream.getvalue().endswith("WARNING asyncfabric.test: hm requests=3\n")


@pytest.mark.parametrize("form", ["text", "json"])
def test_texts_of_others_begin_no_line_and_move_no_cursor(root_logger: logging.Logger, form: str) -> None:
    stream = io.StringIO()
    open_log("info", "json" if form == "json" else "text", stream)
    evil = "a\x1b[2J\x9b\u202e\n2026-01-01 INFO forged"
    logging.getLogger("asyncfabric.test").warning("from %s", evil, extra={"fields": {"node": evil}})
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable() and "forged" in line


def test_one_too_many_is_429_and_a_draining_node_503() -> None:
    condition = Condition("n", "router")
    admission = RequestAdmission(condition, 1)
    with pytest.raises(ApiFault) as starting:
        admission.check()
    assert (starting.value.status, starting.value.code) == (503, "starting")
    condition.state = "ready"
    with admission.admit():
        with pytest.raises(ApiFault) as full, admission.admit():
            pass
        assert (full.value.status, full.value.headers()) == (429, {"retry-after": "1"})
    assert admission.count == 0
    condition.state = "draining"
    with pytest.raises(ApiFault, match="draining") as late, admission.admit():
        pass
    assert late.value.status == 503
    with pytest.raises(ValueError, match="most_requests"):
        RequestAdmission(condition, 0)


@pytest.mark.trio
async def test_a_drain_waits_for_the_last_and_can_cut_off(autojump_clock: trio.testing.MockClock) -> None:
    admission = RequestAdmission(Condition("n", "router", "ready"), 5)
    cut: list[bool] = []

    async def stay(seconds: float) -> None:
        with admission.admit() as place:
            with place.scope:
                await trio.sleep(seconds)
            cut.append(place.cut_off)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay, 2)
        nursery.start_soon(stay, 3)
        await trio.testing.wait_all_tasks_blocked()
        await admission.wait_empty()
        assert trio.current_time() == pytest.approx(3)
        assert cut == [False, False]
        nursery.start_soon(stay, 1000)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(10) as limit:
            await admission.wait_empty()
        assert limit.cancelled_caught
        assert admission.cut_off() == 1
        await admission.wait_empty()
    assert cut == [False, False, True]
    assert trio.current_time() == pytest.approx(13)

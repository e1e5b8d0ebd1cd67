"""The picture of one request in the guide, drawn from a recording."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "docs" / "guide" / "request_picture.py"
NAMES = [
    {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    for number, name in enumerate(("router", "D<1>", "P1"), 1)
]


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("request_picture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def span(name: str, process: int, begin: float, milliseconds: float, trace: str, **args: Any) -> dict[str, Any]:
    args["trace"] = trace
    return {"ph": "X", "name": name, "pid": process, "ts": 1000 * begin, "dur": 1000 * milliseconds, "args": args}


def request(trace: str, begin: float, milliseconds: float) -> list[dict[str, Any]]:
    """Return the spans of a request that takes so long."""
    return [
        span("request", 1, begin, milliseconds, trace),
        span("answer", 2, begin + 1, milliseconds - 1, trace),
        span("prefill prompt", 2, begin + 1, 20, trace),
        span("prefill", 3, begin + 2, 18, trace),
        span("push", 3, begin + 5, 15, trace, bytes=3_000_000),
        span("load", 2, begin + 6, 14, trace, bytes=3_000_000),
        span("decode", 2, begin + 21, milliseconds - 21, trace),
    ]


def test_the_request_of_median_duration_is_drawn_with_all_its_spans(picture: ModuleType) -> None:
    events = [
        *NAMES,
        *request("a", 0, 90),
        *request("b", 100, 50),
        *request("c", 200, 60),
        *request("cut", 300, 55)[:-1],
    ]
    drawn = ElementTree.fromstring(picture.draw(events))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "3 MB of KvCache: one request, 60 ms"
    assert {"router", "D<1>", "P1", "push", "18.0 ms", "59.0 ms"} <= set(texts)
    bars = [float(bar.get("width", "")) for bar in drawn.iter("{http://www.w3.org/2000/svg}rect") if bar.get("rx")]
    assert len(bars) == 7
    assert max(bars) == bars[0] == picture.WIDTH


def test_a_recording_without_a_whole_request_is_refused(picture: ModuleType) -> None:
    with pytest.raises(ValueError, match="no request of the recording has all of"):
        picture.draw([*NAMES, *request("cut", 0, 55)[:-1]])

"""The two faces of a fabric are alike: each call of the async one has its twin, with the same arguments and results."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import asyncfabric as af
from asyncfabric import blocking

PAIRS = [
    (af.Fabric, blocking.Fabric),
    (af.Region, blocking.Region),
    (af.Transfer, blocking.Transfer),
    (af.ImmCounter, blocking.ImmCounter),
    (af.WatchWord, blocking.WatchWord),
    (af.MessageStream, blocking.MessageStream),
]
OTHERWISE = {"aclose": "close"}  # an async close is `aclose`
ONLY_BLOCKING = {
    af.Transfer: {"wait", "has_ended"},  # awaited by itself; `done` brings nothing on
    af.ImmCounter: {"counted"},  # as `has_ended`: `value` brings nothing on
    af.WatchWord: {"wait"},  # iterated over
    af.MessageStream: {"receive"},
    af.Fabric: {"close"},
}
OVER = {"interrupted", "settle", "settle_shielded", "settle_unless_interrupted"}  # between the faces and the bridge


def calls_of(face: type) -> dict[str, Any]:
    """Return the public members of a face by name."""
    return {name: getattr(face, name) for name in dir(face) if not name.startswith("_") and name not in OVER}


def signature_of(call: Any) -> tuple[list[str], str]:
    """Return the arguments without the deadline, which stands for cancelling, and the result, whatever the face."""
    signature = inspect.signature(call)
    arguments = [
        str(one) for one in signature.parameters.values() if one.name != "deadline" or "float |" not in str(one)
    ]
    return arguments, re.sub(r"Awaited", "", str(signature.return_annotation))


@pytest.mark.parametrize(("awaited", "blocks"), PAIRS, ids=lambda face: face.__name__)
def test_both_faces_have_the_same_calls(awaited: type, blocks: type) -> None:
    ours, theirs = calls_of(awaited), calls_of(blocks)
    assert {OTHERWISE.get(name, name) for name in ours} == set(theirs) - (
        ONLY_BLOCKING.get(awaited, set()) - set(OTHERWISE.values())
    )
    for name, call in ours.items():
        twin = theirs[OTHERWISE.get(name, name)]
        assert not inspect.iscoroutinefunction(twin), name
        if callable(call):
            assert signature_of(call) == signature_of(twin), name


def test_every_face_is_compared() -> None:
    assert {one.__name__ for _, one in PAIRS} == {
        name for name in blocking.__all__ if isinstance(getattr(blocking, name), type)
    }
    opening = [inspect.signature(one.open_fabric) for one in (af, blocking)]
    assert opening[0].parameters == opening[1].parameters
    assert str(inspect.signature(blocking.wait_all)) == str(inspect.signature(af.wait_all)).replace(
        ") ->", ", deadline: float | None = None) ->".replace("'", "")
    ).replace("deadline: float | None", "deadline: 'float | None'")


def test_data_calls_are_the_same_functions() -> None:
    for name in ("write", "read", "write_pages", "read_pages", "scatter", "signal", "barrier", "send"):
        assert getattr(af.Fabric, name) is getattr(blocking.Fabric, name), f"{name} is written twice"

"""How much of long bodies a router holds at once, without a socket."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette", reason="the router needs starlette")

from asyncfabric_services.router.bodies import MOST_BODY_BYTES, SHORT_BODY_BYTES, BodyRoom, HeldBody
from asyncfabric_services.router.fault import ApiFault


def test_a_body_takes_room_as_it_comes_and_gives_it_back() -> None:
    room = BodyRoom(3 * SHORT_BODY_BYTES)
    with room.body() as short, room.body() as long:
        short.grow(SHORT_BODY_BYTES)
        long.grow(SHORT_BODY_BYTES)
        assert room.held == 0, "short bodies are always taken"
        long.grow(SHORT_BODY_BYTES)
        assert room.held == 2 * SHORT_BODY_BYTES
        with room.body() as other, pytest.raises(ApiFault, match="is the most") as full:
            other.grow(SHORT_BODY_BYTES + 1)
        assert (full.value.status, full.value.retry_after) == (503, 1)
        assert room.held == 2 * SHORT_BODY_BYTES
        long.grow(SHORT_BODY_BYTES)
        with pytest.raises(ApiFault, match="is the most"):
            long.grow(1)
    assert room.held == 0
    with pytest.raises(ApiFault) as endless:
        HeldBody(BodyRoom()).grow(MOST_BODY_BYTES + 1)
    assert endless.value.status == 413

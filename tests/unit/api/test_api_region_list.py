"""fabric.regions(): what is registered, with size, generation, age and cost; released ones are out."""

from __future__ import annotations

import pytest
from fabrics import LENGTH, open_pair

import asyncfabric as af

pytestmark = pytest.mark.anyio


async def test_each_region_has_a_row_until_it_is_released() -> None:
    async with open_pair() as p:
        more = await p.writer.register(bytearray(100), access="local")
        first, second = p.writer.regions()
        assert (first.length_bytes, second.length_bytes) == (LENGTH, 100)
        assert (first.access, second.access, first.device) == ("read-write", "local", "cpu")
        assert (first.id, second.id) == (p.source.id, more.id)
        assert first.age_s >= second.age_s >= 0 and first.cost_s >= 0 and not first.quarantined
        await p.source.revoke()
        assert p.writer.regions()[0].generation > first.generation
        await more.release()
        assert [row.id for row in p.writer.regions()] == [p.source.id]
    with pytest.raises(af.ClosedError):
        p.writer.regions()

"""Ring 6: a link goes down under load and comes back.

Unposted work moves, ambiguous work fails by name, nothing is lost or counted twice.
Packets vanish before the link does, so that the load is surely on its way then.
"""

from __future__ import annotations

import anyio
import links
import pytest
from extent import cases
from links import far, near
from load import Load, open_load

VANISH = ("loss", "100%")  # what is posted from now on is still outstanding when the link goes
NAMES = ("ambiguous", "may or may not", "rail", "transport", "deadline")


async def _until_rail(load: Load, rail: int, up: bool) -> None:
    while load.writer.rails[rail].up is not up:  # noqa: ASYNC110  # a rail's state has no event to wait for
        await anyio.sleep(0.01)


@pytest.mark.parametrize("theirs", cases([2], [1, 3]))
def test_link_down_under_load_and_up_again(theirs: int) -> None:
    async def check() -> None:
        with anyio.fail_after(110):
            async with open_load(near(2), far(theirs), slots=4_000, piece=6_007) as load:
                await load.run(50)
                assert {rail for rails in load.rails.values() for rail in rails} == {0, 1}
                links.harm(1, *VANISH)
                pending = [load.submit() for _ in range(60)]
                links.down(1)
                await load.settle(pending)
                assert load.failed, "what was on the link cannot all have arrived"
                await _until_rail(load, 1, False)
                for error in load.failed.values():
                    assert any(name in str(error) for name in NAMES), error
                settled = len(load.failed)
                await load.run(60)
                assert len(load.failed) == settled, "work that was submitted after the link was known to be down failed"
                assert {rail for slot in range(110, 170) for rail in load.rails[slot]} == {0}
                links.restore()
                await _until_rail(load, 1, True)
                with anyio.fail_after(60):
                    while not any(1 in load.rails.get(slot, ()) for slot in range(170, load.used)):
                        await load.run(10)
                load.check_bytes()
                await load.check_counts()

    anyio.run(check, backend="trio")


def test_the_only_link_goes_down() -> None:
    """Nothing is left to move work to: writes fail by name in bounded time; later, a new fabric works."""

    async def check() -> None:
        with anyio.fail_after(100):
            async with open_load(near(1), far(1), slots=100, piece=6_007) as load:
                await load.run(10)
                links.harm(0, *VANISH)
                pending = [load.submit() for _ in range(60)]
                links.down(0)
                await load.settle(pending)
                assert load.failed, "what was on the link cannot all have arrived"
                load.check_bytes()
                await load.check_counts()
                links.restore()
            async with open_load(near(1), far(1), slots=20, piece=6_007) as load:
                await load.run(10)
                assert not load.failed

    anyio.run(check, backend="trio")

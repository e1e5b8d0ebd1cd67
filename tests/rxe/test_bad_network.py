"""Ring 6: loss, delay and reordering on the wire. Connecting survives it; a write arrives and counts once."""

from __future__ import annotations

import anyio
import links
import pytest
from extent import cases
from links import far, near
from load import open_load


@pytest.mark.parametrize(
    "netem",
    cases(
        [pytest.param(("loss", "1%", "delay", "1ms", "1ms", "reorder", "25%"), id="both")],
        [
            pytest.param(("loss", "2%"), id="loss"),
            pytest.param(("delay", "2ms", "1ms", "reorder", "30%"), id="reordering"),
        ],
    ),
)
def test_writes_through_a_bad_network(netem: tuple[str, ...]) -> None:
    async def check() -> None:
        for device in (0, 1, 3, 4):
            links.harm(device, *netem)
        with anyio.fail_after(100):
            async with open_load(near(2), far(2), slots=210, piece=12_289) as load:
                await load.run(200, window=16)
                assert not load.failed
                load.check_bytes()
                assert await load.counter.wait(200) == 200

    anyio.run(check, backend="trio")


def test_connecting_when_every_third_packet_is_lost() -> None:
    async def check() -> None:
        for device in (0, 3):
            links.harm(device, "loss", "33%")
        with anyio.fail_after(100):
            async with open_load(near(1), far(1), slots=2, piece=64, connect_deadline=60.0) as load:
                links.restore()
                await load.run(2)
                assert not load.failed
                assert await load.counter.wait(2) == 2

    anyio.run(check, backend="trio")


@pytest.mark.parametrize("side", [pytest.param(0, id="request"), pytest.param(3, id="answer")])
def test_a_lost_request_is_sent_again(side: int) -> None:
    async def restore_when_lost() -> None:
        while links.lost(side) == 0:  # noqa: ASYNC110  (the kernel has no event for it)
            await anyio.sleep(0.005)
        links.restore()

    async def check() -> None:
        with anyio.fail_after(100):
            async with open_load(near(1), far(1), slots=1, piece=64) as load:  # the hosts know each other afterwards
                await load.run(1)
            links.harm(side, "loss", "100%")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(restore_when_lost)
                async with open_load(near(1), far(1), slots=1, piece=64) as load:
                    await load.run(1)
                    assert not load.failed

    anyio.run(check, backend="trio")

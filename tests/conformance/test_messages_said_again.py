"""Messages whose request failed on the way are said again: all come, once and in order; credits are not lost either."""

from __future__ import annotations

import anyio
import pytest

import asyncfabric as af

pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

COUNT = 400
"""Several times what may be untaken."""
PATIENCE_S = 30.0


@pytest.mark.parametrize("engine_of", ["sender", "receiver", "both"])
@pytest.mark.parametrize("rail", ["local", "tcp"])
def test_messages_whose_requests_fail_come_once_and_in_order(rail: str, engine_of: str) -> None:
    """Every seventh request of an engine fails: messages of the sender, words about what was taken of the receiver."""

    def config(name: str) -> af.FabricConfig:
        faulty = f"fault+{rail}?error_every=7"
        return af.FabricConfig(rails=(faulty if engine_of in (name, "both") else f"fault+{rail}",))

    async def body() -> None:
        with anyio.fail_after(PATIENCE_S):
            async with af.open_fabric(config("sender")) as sender, af.open_fabric(config("receiver")) as receiver:
                peer = await sender.connect(receiver.address)
                got: list[int] = []

                async def read() -> None:
                    async for message in receiver.messages():
                        got.append(int(message.payload))
                        if len(got) == COUNT:
                            return

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(read)
                    for number in range(COUNT):
                        await sender.send(peer, b"%d" % number)
                assert got == list(range(COUNT))
                assert sender.statistics().counters["ops_failed"] == 0

    anyio.run(body, backend="trio")

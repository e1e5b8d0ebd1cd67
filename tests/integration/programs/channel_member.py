"""One member of channels over links, or over a TCPStore and perhaps fabrics. Commands and answers are JSON lines."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import trio
from json_lines import answer, lines

from asyncfabric import FabricConfig, open_fabric
from asyncfabric.control import (
    Codec,
    DirectoryClient,
    LinkChannels,
    LinkConfig,
    MemberChannel,
    PeerFound,
    PeerLost,
    StoreChannels,
    open_link,
    serve_directory,
)
from asyncfabric.errors import FabricError

PR_SET_PDEATHSIG = 1
Channel = MemberChannel[tuple[int, bytes]]
CODEC: Codec[tuple[int, bytes]] = Codec(msgspec.msgpack.encode, msgspec.msgpack.Decoder(tuple[int, bytes]).decode)


@asynccontextmanager
async def link_member(first: dict[str, Any]) -> AsyncIterator[tuple[Channel, Any]]:
    """Join over links; who is given no directory is it."""
    config = LinkConfig(ipc_folder=first["folder"], peer_deadline_s=30.0)
    async with open_link(first["name"], config=config) as link, trio.open_nursery() as nursery:
        if not first["place"]:
            await nursery.start(serve, link)
        async with DirectoryClient(link, first["place"] or link.address) as client:
            channels = LinkChannels(link, CODEC, window=first["window"])
            channel = channels.open(first["name"])
            nursery.start_soon(channels.run, client, ("member",))
            await client.register("member", link.address)
            yield channel, link.address
            nursery.cancel_scope.cancel()


async def serve(link: Any, *, task_status: Any) -> None:
    async with serve_directory(link):
        task_status.started()
        await trio.sleep_forever()


@asynccontextmanager
async def store_member(first: dict[str, Any]) -> AsyncIterator[tuple[Channel, Any]]:
    """Join over a TCPStore; who is given no port holds it. The kind "store+fabric" has messages go over fabrics."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", first["place"], is_master=not first["place"], wait_for_workers=False)
    channels = StoreChannels(store, CODEC, window=first["window"], deadline_s=3.0)
    async with AsyncExitStack() as stack:
        if first["kind"] == "store+fabric":
            channels.use_fabric(await stack.enter_async_context(open_fabric(FabricConfig(rails=("local",)))))
        nursery = await stack.enter_async_context(trio.open_nursery())
        channel = await channels.open(first["name"])
        nursery.start_soon(channels.run)
        yield channel, store.port
        nursery.cancel_scope.cancel()


def shown(event: Any) -> Any:
    """Return an event as JSON."""
    if isinstance(event, PeerFound):
        return "found"
    return f"lost: {event.reason}" if isinstance(event, PeerLost) else [event[0], len(event[1])]


async def main() -> None:
    commands = lines()
    first = json.loads(await anext(commands))
    async with (link_member if first["kind"] == "link" else store_member)(first) as (channel, place):
        answer({"place": place})
        async for line in commands:
            command = json.loads(line)
            match command["do"]:
                case "send":
                    try:
                        for number in range(command["count"]):
                            await channel.send(command["to"], (number, bytes(command["length"])))
                        answer({})
                    except FabricError as error:
                        answer({"error": type(error).__name__, "text": str(error)})
                case "take":
                    events = [await channel.receive() for _ in range(command["count"])]
                    answer({"events": [[peer, shown(event)] for peer, event in events]})
                case "leave":
                    await channel.aclose()
                    answer({})
                case "close":
                    break
    answer({"closed": True})


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)  # no orphan survives the test that started it
    trio.run(main)

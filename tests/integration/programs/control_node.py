"""One node of an integration test of the control plane: commands as JSON lines in, one JSON line out for each.

Run as `python control_node.py`; the first line opens the link: {"name", "bind", "keys", "trusted", "config"}. Each
further line names a method below. It ends with standard input, or by "close", which leaves all peers in good order.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import trio
from json_lines import answer, lines

from asyncfabric.control import DirectoryClient, Identity, LinkConfig, LinkKeys, open_link, serve_directory
from asyncfabric.control.keys import ANY_ROLE

PR_SET_PDEATHSIG = 1


class Node:
    """What one process holds."""

    def __init__(self, link: Any, stack: AsyncExitStack) -> None:
        self.link = link
        self.stack = stack
        self.listening: dict[str, Any] = {}
        self.changes: Any = None
        self.client: Any = None
        self.directory: Any = None
        self.seen: Any = None
        self.kinds: list[list[str]] = []

    async def about(self) -> dict[str, Any]:
        return {"address": self.link.address, "identity": list(plain(self.link.identity))}

    async def connect(self, address: str) -> dict[str, Any]:
        return {"peer": plain(await self.link.connect(address))}

    async def send(self, to: list[Any], channel: str, texts: list[str]) -> dict[str, Any]:
        for text in texts:
            await self.link.send(Identity(*to), channel, text.encode())
        return {"sent": len(texts)}

    async def listen(self, channel: str) -> dict[str, Any]:
        self.listening[channel] = await self.stack.enter_async_context(self.link.listen(channel))
        return {}

    async def take(self, channel: str, count: int) -> dict[str, Any]:
        arrivals = [await self.listening[channel].receive() for _ in range(count)]
        return {"arrivals": [[plain(arrival.sender), arrival.body.decode()] for arrival in arrivals]}

    async def watch(self) -> dict[str, Any]:
        self.changes = await self.stack.enter_async_context(self.link.watch())
        return {}

    async def until(self, name: str, state: str) -> dict[str, Any]:
        """Wait for a state of a peer of this name; `watch` came before."""
        async for change in self.changes:
            if (change.peer.name, change.state) == (name, state):
                return {"peer": plain(change.peer), "reason": change.reason}
        raise AssertionError("the watch ended")

    async def block(self, seconds: float) -> dict[str, Any]:
        """Stand still with the whole event loop, as a long call into an extension does."""
        time.sleep(seconds)  # noqa: ASYNC251  # that is the point
        return {}

    async def disconnect(self, peer: list[Any]) -> dict[str, Any]:
        await self.link.disconnect(Identity(*peer))
        return {}

    async def statistics(self) -> dict[str, Any]:
        found = self.link.statistics()
        errors = {reason: count for reason, count in found.protocol_errors.items() if count}
        return {"ready": found.peers_ready, "lost": found.peers_lost, "errors": errors}

    async def serve(self, lease_ns: int) -> dict[str, Any]:
        self.directory = await self.stack.enter_async_context(serve_directory(self.link, lease_ns=lease_ns))
        return {}

    async def join(self, address: str, role: str) -> dict[str, Any]:
        """Register with the directory at an address, our own among them."""
        self.client = await self.stack.enter_async_context(DirectoryClient(self.link, address))
        self.seen = await self.stack.enter_async_context(self.client.watch())
        await self.client.register(role, self.link.address, {"role": role})
        return {}

    async def drain(self) -> dict[str, Any]:
        await self.client.drain()
        return {}

    async def leave(self) -> dict[str, Any]:
        await self.client.leave()
        return {}

    async def nodes(self) -> dict[str, Any]:
        return {"nodes": [[*plain(node.identity), node.role, node.state] for node in self.client.nodes()]}

    async def until_nodes(self, wanted: list[list[str]]) -> dict[str, Any]:
        """Wait until the view has just these names and states; return all that happened since we joined."""
        while [[node.identity.name, node.state] for node in self.client.nodes()] != wanted:
            self.note(await self.seen.receive())
        with suppress(anyio.WouldBlock):
            while True:
                self.note(self.seen.receive_nowait())
        return {**await self.nodes(), "kinds": self.kinds}

    def note(self, change: Any) -> None:
        self.kinds.append([change.kind, change.node.identity.name])


def plain(identity: Identity) -> tuple[str, int]:
    return identity.name, identity.incarnation


async def main() -> None:
    commands = lines()
    first = json.loads(await anext(commands))
    keys = LinkKeys(*first["keys"], dict.fromkeys(first["trusted"], ANY_ROLE)) if first.get("keys") else None
    config = LinkConfig(**first.get("config", {}))
    async with open_link(first["name"], bind=first["bind"], keys=keys, config=config) as link:
        async with AsyncExitStack() as stack:
            node = Node(link, stack)
            answer(await node.about())
            async for line in commands:
                command = json.loads(line)
                what = command.pop("do")
                if what == "close":
                    break
                try:
                    answer(await getattr(node, what)(**command))
                except Exception as error:
                    answer({"error": type(error).__name__, "text": str(error)})
        await stack.aclose()
    answer({"closed": True})


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.exit(trio.run(main))

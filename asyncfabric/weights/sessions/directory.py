"""DirectoryJoin: a training and its engines that know the address of a cluster's directory find each other there.

Event loop's thread. Rank 0 of the training serves a store and registers it under the meeting's name, as long as it
lives; everybody else looks it up, and waits for it. The store is plain TCP: it belongs on a private network.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from asyncfabric.control import DirectoryClient, LinkKeys, open_link
from asyncfabric.control.address import LinkAddress
from asyncfabric.control.channels.store import DEADLINE_S
from asyncfabric.control.channels.store_calls import KeyStore
from asyncfabric.control.messages import checked_name
from asyncfabric.errors import BrokenError
from asyncfabric.weights.sessions.join import Join, StoreJoin
from asyncfabric.weights.sessions.stores import connect_store, serve_store
from asyncfabric.weights.threads import in_thread

ROLE = "weights"
"""Of a training's rank 0 in the directory."""
STORE_LABEL = "store"
CALL_S = 60.0
"""Deadline of one call of the store."""


class DirectoryJoin:
    """A meeting of the name that stands in a directory."""

    def __init__(
        self,
        address: str,
        name: str = "weights",
        *,
        host: str = "",
        keys: LinkKeys | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Meet by a directory.

        Args:
            address: of its link, as `asyncfabric serve directory` prints it; of several, joined by commas.
            name: distinguishes the meetings of one directory; one training has it at a time.
            host: of rank 0 of the training, as the others reach it; empty for the address that leads to the directory.
            keys: for a directory over tcp with keys.
            deadline_s: as of StoreJoin.

        Raises:
            TypeError, ValueError: no address of a link, or no name.
        """
        self._address, *others = LinkAddress.parse_all(address)
        self._directories = ",".join(map(str, (self._address, *others)))
        self._name = checked_name("name", name)
        self._host = host
        self._keys = keys
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def attend(self, *, serves: bool) -> AsyncIterator[StoreJoin]:
        """Find the meeting, which is over when whoever serves it leaves.

        Args:
            serves: of rank 0 of the training alone.

        Raises:
            PeerError: the directory refuses this process.
            BrokenError: the store that stands in the directory does not answer.

        Cancellation: only this wait ends.
        """
        node = f"{self._name[:40]}.{'training' if serves else secrets.token_hex(8)}"
        async with (
            open_link(
                node,
                role=ROLE if serves else "",
                keys=self._keys,
                insecure=self._address.is_tcp and not self._address.key,
            ) as link,
            DirectoryClient(link, self._directories) as directory,
        ):
            if serves:
                host = self._host or host_towards(self._address)
                store, port = serve_store(host, 0, CALL_S)
                await directory.register(ROLE, link.address, {STORE_LABEL: f"{host}:{port}"})
                yield self._over(store)
                await directory.leave()
                return
            place = await self._find(directory, f"{self._name[:40]}.training")
        host, _, port_text = place.rpartition(":")
        try:
            store = await in_thread(connect_store, host, int(port_text), self._deadline_s)
        except (RuntimeError, ValueError) as error:
            raise BrokenError(
                f"the store of {self._name} at {place[:80]!r} does not answer: {str(error)[:200]}",
                remedy="is rank 0 of the training alive, and its host reached from here?",
            ) from error
        yield self._over(store)

    async def _find(self, directory: DirectoryClient, node: str) -> str:
        while True:  # a watch that fell too far behind ends, and a new one begins with the present state
            async with directory.watch() as changes:
                async for change in changes:
                    one = change.node
                    if one.identity.name == node and change.kind not in ("left", "lost") and STORE_LABEL in one.labels:
                        return one.labels[STORE_LABEL]

    def _over(self, store: KeyStore) -> StoreJoin:
        return StoreJoin(store, self._name, deadline_s=self._deadline_s)


Meeting = Join | DirectoryJoin | KeyStore | str
"""Where a training and its engines meet: a Join, the address of a directory, or a store of torch.distributed."""


@asynccontextmanager
async def attend(meeting: Meeting, *, serves: bool) -> AsyncIterator[Join]:
    """Take part in a meeting; `serves` at rank 0 of the training.

    Raises:
        TypeError, ValueError: none of the kinds of a meeting.
        PeerError, BrokenError: as `DirectoryJoin.attend`.

    Cancellation: only this wait ends.
    """
    if isinstance(meeting, str):
        meeting = DirectoryJoin(meeting)
    if isinstance(meeting, DirectoryJoin):
        async with meeting.attend(serves=serves) as join, join.attend() as members:
            yield members
    elif isinstance(meeting, StoreJoin):
        async with meeting.attend() as members:
            yield members
    elif hasattr(meeting, "open_channel"):
        yield cast(Join, meeting)
    elif hasattr(meeting, "check"):
        async with StoreJoin(meeting).attend() as members:
            yield members
    else:
        raise TypeError(f"join must be a Join, a store, or a directory's address, got {type(meeting).__name__}")


def host_towards(address: LinkAddress) -> str:
    """Return the address of this host that leads to a directory: that of the loopback for one on this host."""
    if not address.is_tcp:
        return "127.0.0.1"
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))  # sends nothing
        return str(probe.getsockname()[0])

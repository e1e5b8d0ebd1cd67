"""open_link: the front door of the control plane. Puts wire, switchboard and link together, and takes them apart.

On the event loop's thread. The sockets are in `zmq_wire`, the only file that imports zmq.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from asyncfabric.control.endpoint import Endpoint, new_incarnation
from asyncfabric.control.keys import NOBODY, LinkKeys, spoken_roles
from asyncfabric.control.link import Link
from asyncfabric.control.link_values import LinkConfig
from asyncfabric.control.messages import Identity, checked_name
from asyncfabric.control.switchboard import Switchboard
from asyncfabric.control.zmq_wire import ZmqWire

DEFAULTS = LinkConfig()
__all__ = ["Link", "LinkConfig", "LinkKeys", "open_link"]


@asynccontextmanager
async def open_link(
    name: str,
    *,
    role: str = "",
    bind: str = "ipc",
    keys: LinkKeys | None = None,
    insecure: bool = False,
    config: LinkConfig = DEFAULTS,
) -> AsyncIterator[Link]:
    """Give this process a place in the control plane, used with `async with`.

    Leaving the block leaves all peers in two phases, for at most `config.close_deadline_s`, then closes.

    Args:
        name: what others call this process: 1..64 letters, digits, `.`, `_` and `-`. A later start under the same name
            replaces this one where its role and key are the same, and is refused by all who know this one else.
        role: what a node does, in the same letters; empty for a process that is no node. One that our key is bound to.
        bind: "ipc" for a socket in a private folder; "ipc:///folder/name.sock" for a place that stays the same;
            "tcp" for 127.0.0.1 and any port; "tcp://host:port".
        keys: for tcp: our keys and whom we trust.
        insecure: use plain TCP, which neither hides nor authenticates anything.
        config: times and bounds.

    Raises:
        TypeError, ValueError: an argument is wrong, tcp has neither keys nor `insecure`, or the key is of another role.
        DeviceError: the endpoint cannot be bound.

    Cancellation: closing is shielded, and bounded as described above.
    """
    identity = Identity(checked_name("name", name), new_incarnation())
    if role:
        checked_name("role", role)
    if keys is not None and keys.roles and role not in keys.roles:
        raise ValueError(
            f"the key {keys.public[:8]}... is bound to {spoken_roles(keys.roles)}, and {name} is "
            f"{role or 'no node'}: use a key of its role, made by `asyncfabric keys new FILE --role {role or 'ROLE'}`"
        )
    endpoint = Endpoint.parse(bind, identity, keys, insecure=insecure, config=config)
    wire = ZmqWire(config, keys, insecure)
    try:
        async with anyio.create_task_group() as tasks:
            try:
                got = wire.bind(endpoint.text, tasks)
                switchboard = Switchboard(
                    identity, role, endpoint.published(got), config, wire, keys.trusted if keys is not None else NOBODY
                )
                wire.switchboard = switchboard
                tasks.start_soon(switchboard.keep_time)
                link = Link(switchboard, config, tasks)
                try:
                    yield link
                finally:
                    with anyio.CancelScope(shield=True):
                        await link.aclose()
            finally:
                tasks.cancel_scope.cancel()
                wire.close()
    except BaseExceptionGroup as group:
        # The group is ours, not the caller's: one exception in it is the caller's own, or the bug that ended us.
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await wire.aclose()
        endpoint.remove()

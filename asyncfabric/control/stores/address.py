"""Addresses of stores as text: `memory`, `etcd://host:port/prefix` and `torch://host:port/prefix`. Parsing is pure."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final

from asyncfabric.control.stores.memory import DirectoryStore, MemoryStore
from asyncfabric.control.stores.torch_store import TorchStore, connect_tcp
from asyncfabric.errors import DeviceError

PREFIX: Final = "asyncfabric"
_FORM = re.compile(r"(?P<kind>etcd|torch)://(?P<members>[^/\s]+)(/(?P<prefix>[A-Za-z0-9._/-]{1,128}))?")
_MEMBER = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A parsed address.

    Attributes:
        kind: memory, etcd or torch.
        members: host:port of each member; several for etcd alone.
        prefix: of all keys; one cluster's.
    """

    kind: str
    members: tuple[str, ...] = ()
    prefix: str = PREFIX

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """Parse the text form; raises ValueError naming the text and the form."""
        if text == "memory":
            return cls("memory")
        found = _FORM.fullmatch(text)
        members = tuple(found["members"].split(",")) if found is not None else ()
        if found is None or not all(map(_MEMBER.fullmatch, members)) or (found["kind"] == "torch" and len(members) > 1):
            raise ValueError(
                f"store {text[:80]!r}: expected memory, etcd://host:port/prefix (of several members "
                "etcd://a:2379,b:2379/prefix) or torch://host:port/prefix"
            )
        return cls(found["kind"], members, (found["prefix"] or PREFIX).strip("/"))


@asynccontextmanager
async def open_store(address: str) -> AsyncIterator[DirectoryStore]:
    """Open a store by its address, for `serve_directory`. It is not asked yet, so it may start later.

    Raises:
        ValueError: the text is no address of a store.
        DeviceError: the package that the store needs is not installed.

    Cancellation: its connections close.
    """
    parsed = StoreAddress.parse(address)
    if parsed.kind == "memory":
        yield MemoryStore()
    elif parsed.kind == "etcd":
        try:
            from asyncfabric.control.stores.etcd import EtcdStore
        except ImportError as error:
            raise DeviceError(
                f"a store in etcd needs {error.name}", remedy="pip install 'asyncfabric[etcd]'"
            ) from error
        async with EtcdStore(parsed.members, parsed.prefix) as store:
            yield store
    else:
        if find_spec("torch") is None:
            raise DeviceError("a store of torch.distributed needs torch", remedy="pip install 'asyncfabric[torch]'")
        host, _, port = parsed.members[0].rpartition(":")
        yield TorchStore(partial(connect_tcp, host.strip("[]"), int(port)), parsed.prefix)

"""From what a caller gives for binding to an endpoint, and from the endpoint that was got to the address for others.

Short file calls for ipc (see `ipc_folder`), on the event loop's thread while a link opens. Knows no sockets.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path

from asyncfabric.control import ipc_folder
from asyncfabric.control.address import LinkAddress
from asyncfabric.control.keys import LinkKeys
from asyncfabric.control.link_values import LinkConfig
from asyncfabric.control.messages import Identity
from asyncfabric.errors import DeviceError

log: logging.Logger = logging.getLogger("asyncfabric.control")

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+|\*):(?P<port>\d{1,5}|\*)")
_EVERYWHERE = ("*", "0.0.0.0", "[::]")
_last_incarnation = 0


def new_incarnation() -> int:
    """Return a number that grows with each link of this process, and with each start of a process on this clock."""
    global _last_incarnation  # noqa: PLW0603  # the one counter of this process
    _last_incarnation = max(_last_incarnation + 1, time.time_ns())
    return _last_incarnation


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a link binds.

    Attributes:
        text: what ZeroMQ binds.
        key: our public key when CURVE is used.
        advertise_host: host for the address, when it is not the one bound.
        path: the socket file of ipc.
    """

    text: str
    key: str = ""
    advertise_host: str = ""
    path: Path | None = None

    @classmethod
    def parse(
        cls, bind: str, identity: Identity, keys: LinkKeys | None, *, insecure: bool, config: LinkConfig
    ) -> Endpoint:
        """Check what the caller wants, and make ready what it needs."""
        if not isinstance(bind, str):
            raise TypeError(f"bind must be text, got {type(bind).__name__}")
        if bind == "ipc" or bind.startswith("ipc:///"):
            return cls._ipc(bind, identity, config)
        found = _TCP.fullmatch("tcp://127.0.0.1:0" if bind == "tcp" else bind)
        if found is None:
            raise ValueError(f'bind must be "ipc", "ipc:///path", "tcp" or "tcp://host:port", got {bind!r}')
        if insecure and keys is not None:
            raise ValueError("keys and insecure=True exclude each other: plain TCP uses no keys")
        if keys is None and not insecure:
            raise ValueError(
                f"bind={bind!r} needs keys (make them with `asyncfabric keys new`, read them with read_keys), or "
                "insecure=True for plain TCP that anybody on the network can read and join"
            )
        if found["host"] in _EVERYWHERE and not config.advertise_host:
            raise ValueError(
                f"bind={bind!r} is all interfaces: name the host that others use, LinkConfig(advertise_host=...)"
            )
        if insecure:
            log.warning(
                "%s LISTENS ON PLAIN TCP (%s): whoever reaches it can join, read and change everything; "
                "use keys anywhere but in a closed test",
                identity,
                found[0],
            )
        port = "*" if found["port"] == "0" else found["port"]
        return cls(f"tcp://{found['host']}:{port}", keys.public if keys else "", config.advertise_host)

    @classmethod
    def _ipc(cls, bind: str, identity: Identity, config: LinkConfig) -> Endpoint:
        if bind == "ipc":
            folder = Path(config.ipc_folder) if config.ipc_folder else ipc_folder.default_folder()
            ipc_folder.make_private(folder)
            ipc_folder.sweep(folder)
            path = ipc_folder.socket_path(folder, identity.name, identity.incarnation)
        else:
            path = Path(bind.removeprefix("ipc://"))
            ipc_folder.make_private(path.parent)
            ipc_folder.check_length(path)
            if ipc_folder.is_listened_on(path):
                # libzmq would take the path over, and the other process would listen where nobody comes.
                raise DeviceError(f"somebody listens on {path}", remedy="end that process, or take another path")
        return cls(f"ipc://{path}", path=path)

    def published(self, got: str) -> str:
        """Return the address for others, from the endpoint that ZeroMQ got."""
        if self.path is not None:
            return str(LinkAddress(self.text))
        if self.advertise_host:
            got = f"tcp://{self.advertise_host}:{got.rpartition(':')[2]}"
        return str(LinkAddress(got, self.key))

    def remove(self) -> None:
        """Remove the socket file, unless another process has bound the path since."""
        if self.path is not None and not ipc_folder.is_listened_on(self.path):
            self.path.unlink(missing_ok=True)

"""TorchStore: a store in a `torch.distributed` store, such as the TCPStore of a training.

Calls block, so they are made on threads, one at a time; a client whose server went away is made anew. The server keeps
values in its memory: when it ends, the table begins anew, as after the end of a directory that stood alone.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from asyncfabric.errors import BrokenError

CALL_S: Final = 5.0
POLL_S: Final = 0.05
MARK_BYTES: Final = 8
"""Before each value: of two who wrote the same one, each knows whether it was first."""
_Result = TypeVar("_Result")


class TorchStore:
    """Values under a prefix of a torch.distributed store."""

    def __init__(self, connect: Callable[[], Any], prefix: str = "asyncfabric") -> None:
        """Make a store of what `connect` returns: it has `get`, `set`, `check`, `compare_set` and `delete_key`.

        `connect` blocks, is called on a thread, and again after a call that failed.
        """
        self._connect = connect
        self._prefix = prefix
        self._client: Any = None
        self._lock = threading.Lock()

    async def create(self, key: str, value: bytes) -> bool:
        """See DirectoryStore.

        Cancellation: as there.
        """
        marked = secrets.token_bytes(MARK_BYTES) + value
        return await self._call(lambda client: bool(client.compare_set(self._key(key), "", marked) == marked))

    async def put(self, key: str, value: bytes) -> None:
        """See DirectoryStore.

        Cancellation: as there.
        """
        await self._call(lambda client: client.set(self._key(key), bytes(MARK_BYTES) + value))

    async def get(self, key: str) -> bytes | None:
        """See DirectoryStore.

        Cancellation: as there.
        """
        place = self._key(key)
        return await self._call(lambda client: client.get(place)[MARK_BYTES:] if client.check([place]) else None)

    async def delete(self, keys: Iterable[str]) -> None:
        """See DirectoryStore.

        Cancellation: as there.
        """
        await self._call(lambda client: [client.delete_key(self._key(key)) for key in keys])

    async def wait(self, key: str) -> None:
        """See DirectoryStore; the next look comes in a moment, since a store's own wait holds its client.

        Cancellation: as there.
        """
        await anyio.sleep(POLL_S)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    async def _call(self, what: Callable[[Any], _Result]) -> _Result:
        return await anyio.to_thread.run_sync(self._called, what, abandon_on_cancel=False)

    def _called(self, what: Callable[[Any], _Result]) -> _Result:
        with self._lock:
            try:
                if self._client is None:
                    self._client = self._connect()
                return what(self._client)
            except (RuntimeError, OSError, ValueError) as error:  # torch's errors are RuntimeErrors
                self._client = None
                raise BrokenError(
                    f"the torch.distributed store does not answer: {str(error)[:200]}",
                    remedy="is the process that serves it alive, and its port reached from here?",
                ) from error


def connect_tcp(host: str, port: int) -> Any:
    """Return a client of a TCPStore that another process serves; blocking.

    Raises:
        RuntimeError: nobody serves it within CALL_S.
    """
    import torch.distributed as dist

    deadline = timedelta(seconds=CALL_S)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=deadline)  # type: ignore[attr-defined]

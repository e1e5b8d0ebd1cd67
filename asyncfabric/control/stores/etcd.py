"""EtcdStore: a store in etcd (3.4 or later), over the JSON gateway of its v3 API, which its client port serves.

On the event loop's thread. HTTP is httpx2's; a call goes to the next member when one does not answer. Reads are
linearizable: a member that is cut off from the others answers none.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Final

import anyio
import httpx2

from asyncfabric.errors import BrokenError

CALL_S: Final = 3.0
LONGEST_WAIT_S: Final = 5.0
MOST_OPERATIONS: Final = 100
"""Of one transaction; etcd takes 128."""


class EtcdStore:
    """Values under a prefix of an etcd; open it with `async with`."""

    def __init__(self, members: Sequence[str], prefix: str) -> None:
        """Make a store of the members, each host:port, of one etcd cluster."""
        self._members = list(members)
        self._prefix = prefix
        self._http = httpx2.AsyncClient(timeout=CALL_S, trust_env=False)

    async def __aenter__(self) -> EtcdStore:
        """Return itself; nothing is asked yet.

        Cancellation: does not wait.
        """
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Close the connections.

        Cancellation: they close all the same.
        """
        await self._http.aclose()

    async def create(self, key: str, value: bytes) -> bool:
        """See DirectoryStore.

        Cancellation: as there.
        """
        absent = {"key": self._key(key), "target": "CREATE", "create_revision": "0"}
        put = {"request_put": {"key": self._key(key), "value": _text(value)}}
        answer = await self._call("kv/txn", {"compare": [absent], "success": [put]})
        return bool(answer.get("succeeded"))

    async def put(self, key: str, value: bytes) -> None:
        """See DirectoryStore.

        Cancellation: as there.
        """
        await self._call("kv/put", {"key": self._key(key), "value": _text(value)})

    async def get(self, key: str) -> bytes | None:
        """See DirectoryStore.

        Cancellation: as there.
        """
        value, _ = await self._read(key)
        return value

    async def delete(self, keys: Iterable[str]) -> None:
        """See DirectoryStore.

        Cancellation: as there.
        """
        operations = [{"request_delete_range": {"key": self._key(key)}} for key in keys]
        for begin in range(0, len(operations), MOST_OPERATIONS):
            await self._call("kv/txn", {"success": operations[begin : begin + MOST_OPERATIONS]})

    async def wait(self, key: str) -> None:
        """See DirectoryStore; watches from the revision of a read that did not find it.

        Cancellation: as there.
        """
        value, revision = await self._read(key)
        if value is not None:
            return
        request = {"create_request": {"key": self._key(key), "start_revision": str(revision + 1)}}
        url = f"http://{self._members[0]}/v3/watch"
        try:
            async with self._http.stream("POST", url, json=request, timeout=LONGEST_WAIT_S) as answer:
                if answer.status_code != 200:
                    raise self._away(f"a watch is answered {answer.status_code}")
                with anyio.CancelScope() as reading:  # leaving the iteration would leave generators within it open
                    async for line in answer.aiter_lines():
                        if '"events"' in line or '"canceled"' in line:
                            reading.cancel()
        except httpx2.ReadTimeout:
            return  # nothing came for long: the member may be gone without a word, and the next read finds out
        except httpx2.HTTPError as error:
            raise self._away(error) from error

    async def _read(self, key: str) -> tuple[bytes | None, int]:
        answer = await self._call("kv/range", {"key": self._key(key)})
        found = answer.get("kvs", [])
        return b64decode(found[0].get("value", "")) if found else None, int(answer["header"]["revision"])

    async def _call(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        failure: BrokenError | None = None
        for _ in self._members:
            try:
                answer = await self._http.post(f"http://{self._members[0]}/v3/{path}", json=request)
                if answer.status_code == 200:
                    return dict(answer.json())
                failure = self._away(answer.text[:200])
            except (httpx2.HTTPError, ValueError) as error:
                failure = self._away(error)
            self._members.append(self._members.pop(0))
        assert failure is not None
        raise failure

    def _away(self, error: object) -> BrokenError:
        text = str(error) or type(error).__name__
        return BrokenError(f"etcd at {self._members[0]}: {text}", remedy="does it run, and is its client port reached?")

    def _key(self, key: str) -> str:
        return _text(f"{self._prefix}/{key}".encode())


def _text(value: bytes) -> str:
    return b64encode(value).decode()

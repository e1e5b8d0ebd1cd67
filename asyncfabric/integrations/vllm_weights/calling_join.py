"""CallingJoin: a meeting that a training calls its engines into, and that ends for everybody when a call fails."""

from __future__ import annotations

import anyio

from asyncfabric._groups import unwrapped
from asyncfabric.errors import BrokenError
from asyncfabric.weights.blocking import StoreJoin

_FAILURE = "failure"


class CallingJoin(StoreJoin):
    """A StoreJoin that any rank of the training can end before there is a plan."""

    def interrupt(self, error: BaseException) -> None:
        """End what rank 0 waits for; from a thread without an event loop.

        Raises:
            BrokenError: the store does not answer any more.
        """
        anyio.run(self.put, _FAILURE, _text(error))

    def fail(self, error: BaseException) -> None:
        """End the waits of all ranks and engines; from a thread without an event loop.

        Raises:
            BrokenError: the store does not answer any more.
        """
        anyio.run(self._refuse, _text(error))

    async def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Raises:
            BrokenError: somebody called `interrupt` or `fail`; the text is of the error.

        Cancellation: only this wait ends.
        """
        if key in ("blueprint", "refusal"):
            return await super().get(key)
        found: dict[str, bytes] = {}
        with unwrapped():
            async with anyio.create_task_group() as tasks:

                async def read(one: str) -> None:
                    found[one] = await StoreJoin.get(self, one)
                    tasks.cancel_scope.cancel()

                tasks.start_soon(read, key)
                tasks.start_soon(read, _FAILURE)
        if key in found:
            return found[key]
        raise BrokenError(f"the meeting ended before there was a plan: {found[_FAILURE].decode(errors='replace')}")

    async def _refuse(self, text: bytes) -> None:
        for key, value in ((_FAILURE, text), ("refusal", text), ("blueprint", b"")):
            await self.put(key, value)


def _text(error: BaseException) -> bytes:
    return f"{type(error).__name__}: {error}".encode()

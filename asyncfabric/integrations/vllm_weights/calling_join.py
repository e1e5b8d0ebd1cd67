"""CallingJoin: a meeting that a training calls its engines into, and that ends for everybody when a call fails."""

from __future__ import annotations

import anyio

from asyncfabric._groups import unwrapped
from asyncfabric.errors import BrokenError
from asyncfabric.weights.blocking import StoreJoin

_FAILURE = "failure"


class CallingJoin(StoreJoin):
    """A StoreJoin whose waits, of all ranks and engines, any rank of the training can end."""

    def end(self, error: BaseException) -> None:
        """End the waits of everybody, where nobody has; from a thread without an event loop.

        Raises:
            BrokenError: the store does not answer any more.
        """
        anyio.run(self._end, text_of(error).encode())

    async def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Raises:
            BrokenError: somebody called `end`; the text is of the error.

        Cancellation: only this wait ends.
        """
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
        raise BrokenError(f"the meeting ended: {found[_FAILURE].decode(errors='replace')}")

    async def _end(self, text: bytes) -> None:
        if not await self.take_number("failures"):  # what others raise then follows from the first
            await self.put(_FAILURE, text)


def text_of(error: BaseException) -> str:
    """Return what others are given of an error."""
    return f"{type(error).__name__}: {error}"

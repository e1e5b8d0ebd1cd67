"""Waiting until the engine takes another transfer.

Runs on the event loop's thread, or in a step of a fabric of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.pending import Pending

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher


class WritableCall(Pending):
    """One question to the engine: when is there room?"""

    __slots__ = ()

    async def wait(self) -> None:
        """Return at the answer.

        Cancellation: the question stays open in the engine; only the wait for it ends.
        """
        await self.settle_unless_interrupted()
        if self.abandoned:
            raise faults.closed("the fabric")

    def describe(self) -> str:
        """Return the wait in words."""
        return "wait_writable"


async def wait_writable(dispatcher: CompletionDispatcher) -> None:
    """Return when there is room for a transfer.

    Cancellation: only this wait ends.
    """
    dispatcher.check_loop()
    await dispatcher.checkpoint()
    call: WritableCall | None = dispatcher.questions.get(WritableCall)
    if call is None or call.ended:
        call = _ask(dispatcher)
    dispatcher.drain()
    await call.wait()


def _ask(dispatcher: CompletionDispatcher) -> WritableCall:
    call = WritableCall(dispatcher)
    cookie = dispatcher.next_cookie()
    dispatcher.parked[cookie] = call
    try:
        dispatcher.engine.arm_writable(cookie)
    except EngineStatusError as error:
        del dispatcher.parked[cookie]
        raise faults.refused(error, faults.FailedCall("wait_writable")) from None
    dispatcher.questions[WritableCall] = call
    return call

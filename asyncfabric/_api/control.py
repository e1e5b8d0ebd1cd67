"""Control calls: register, connect, revoke, release and their kin, each ending in one CONTROL completion.

Runs on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import Completion, EngineStatusError
from asyncfabric._bridge.pending import Pending

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher


class ControlCall(Pending):
    """One control call in flight. `detail` is the engine's reason of a failure, `keepalive` what the call uses."""

    __slots__ = ("detail", "keepalive", "what")

    def __init__(self, dispatcher: CompletionDispatcher, what: str) -> None:
        super().__init__(dispatcher)
        self.what: str = what
        self.detail: str = ""
        self.keepalive: object = None

    def complete(self, completion: Completion) -> None:
        """Keep the completion, and the engine's words about a failure while they are the newest."""
        if completion.code:
            self.detail = self._dispatcher.engine.last_error()
        super().complete(completion)

    async def wait(self) -> int:
        """Return the new id, or raise the error of the call.

        Cancellation: the call goes on in the engine; only the wait for it ends.
        """
        await self.settle_unless_interrupted()
        return self.value()

    def value(self) -> int:
        """Return the new id of a call that has ended, or raise its error."""
        completion = self.completion
        if completion is None:
            raise faults.closed(f"the fabric of {self.what}")
        if completion.code:
            raise faults.failed(completion, faults.FailedCall(self.what), self.detail)
        return completion.value

    def describe(self) -> str:
        """Return the call in words."""
        return self.what


def submit_control(
    dispatcher: CompletionDispatcher, what: str, submit: Callable[..., None], *arguments: Any
) -> ControlCall:
    """Submit a control call; raises what the engine refuses at once, ClosedError, or RuntimeError in another loop."""
    dispatcher.check_loop()
    if dispatcher.closing:
        raise faults.closed("the fabric")
    call = ControlCall(dispatcher, what)
    cookie = dispatcher.next_cookie()
    dispatcher.parked[cookie] = call
    try:
        submit(cookie, *arguments)
    except EngineStatusError as error:
        del dispatcher.parked[cookie]
        raise faults.refused(error, faults.FailedCall(what)) from None
    return call

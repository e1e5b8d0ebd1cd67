"""Opening counters: at once, or when the peers have confirmed that the last counter of the same imm is closed.

Runs on the event loop's thread, or in a step of a fabric of threads. What confirming means is the engine's:
native/src/engine/counters/closings.h.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from asyncfabric._api.control import ControlCall, submit_control
from asyncfabric._api.counter import CounterT
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import EngineStatusError
from asyncfabric._bridge.status import StatusCode
from asyncfabric.types import Waiting

if TYPE_CHECKING:
    from asyncfabric._bridge.dispatcher import CompletionDispatcher

_ANY = -1


def open_counter_now(kind: type[CounterT], dispatcher: CompletionDispatcher, imm: int) -> CounterT:
    """Open the counter of an imm, of a free one for -1; raises BusyError, which names the peers that it waits for."""
    try:
        return kind(dispatcher, *dispatcher.engine.open_counter(imm))
    except EngineStatusError as error:
        raise _refused(dispatcher, error, imm) from None


async def open_counter_later(kind: type[CounterT], dispatcher: CompletionDispatcher, imm: int) -> CounterT:
    """Open the counter of an imm once no peer has to confirm the close of the last one.

    Cancellation: only this wait ends.
    """
    await dispatcher.checkpoint()
    while True:
        try:
            return kind(dispatcher, *dispatcher.engine.open_counter(imm))
        except EngineStatusError as error:
            if error.code != StatusCode.UNCONFIRMED:
                raise _refused(dispatcher, error, imm) from None
        call: ControlCall | None = dispatcher.questions.get(imm)
        if call is None or call.ended:
            call = submit_control(dispatcher, f"opening the counter of imm {imm}", dispatcher.engine.arm_closed, imm)
            dispatcher.questions[imm] = call
        dispatcher.drain()
        try:
            await call.wait()
        finally:
            if call.ended and dispatcher.questions.get(imm) is call:
                del dispatcher.questions[imm]


def closings_waiting(dispatcher: CompletionDispatcher) -> list[Waiting]:
    """Return a line for each close that peers have not confirmed."""
    if dispatcher.closed:
        return []
    now = monotonic()
    return [
        Waiting(
            f"the close of the counter of imm {closing.imm}",
            "confirmations of peers",
            0,
            len(closing.peers),
            tuple(map(dispatcher.peer_name, closing.peers)),
            now - closing.age_ns * 1e-9,
            {"imm": closing.imm},
        )
        for closing in dispatcher.engine.closings(_ANY)
    ]


def _refused(dispatcher: CompletionDispatcher, error: EngineStatusError, imm: int) -> Exception:
    peers: list[str] = []
    if error.code == StatusCode.UNCONFIRMED and imm != _ANY:
        peers = [dispatcher.peer_name(peer) for one in dispatcher.engine.closings(imm) for peer in one.peers]
    return faults.counter_refused(error, None if imm == _ANY else imm, peers)

"""Recording many nodes at once over their HTTP endpoints, with their clocks. On the event loop; draws nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from urllib.parse import urlencode

import msgspec

from asyncfabric.observe.trace import Recording, boot_id
from asyncfabric.unreadable import UNREADABLE
from asyncfabric_services.look.asking import NoAnswer, exchange
from asyncfabric_services.look.places import Places
from asyncfabric_services.trace.clocks import Reading, best_of, on_one_clock

QUESTIONS = 8  # to each clock


async def record_all(places: Places, seconds: float) -> list[Recording]:
    """Return a recording of each node that answers, laid on the clock of this host.

    Raises EnvironmentUnfit when none answers.

    Cancellation: nodes go on recording until their time is over, for nobody.
    """
    readings: list[Reading] = []

    async def recorded(url: str) -> Recording:
        for _ in range(QUESTIONS):
            readings.append(await read_clock(url, places.patience_s))
        return await _recorded(url, seconds, places.patience_s)

    recordings = await places.ask_each(recorded)
    return on_one_clock(recordings, best_of(readings), boot_id(), time.time_ns() - time.monotonic_ns())


async def read_clock(url: str, patience_s: float) -> Reading:
    """Ask a node for its clock, once; raises NoAnswer.

    Cancellation: the connection is dropped.
    """
    answer = await exchange(url, "/clock", patience_s)
    try:
        reported: Mapping[str, object] = json.loads(answer.body)
        host, there_ns = reported["host"], reported["monotonic_ns"]
    except (*UNREADABLE, KeyError, TypeError):
        host, there_ns = None, None
    if not isinstance(host, str) or not isinstance(there_ns, int):
        raise NoAnswer("it does not report its clock")
    return Reading(host, answer.sent_ns, answer.came_ns, there_ns)


async def _recorded(url: str, seconds: float, patience_s: float) -> Recording:
    path = f"/trace?{urlencode({'seconds': f'{seconds:.6f}s'})}"
    answer = await exchange(url, path, seconds + patience_s)
    try:
        return msgspec.json.decode(answer.body, type=Recording)
    except UNREADABLE as error:
        raise NoAnswer(f"its answer is no recording: {error}") from None

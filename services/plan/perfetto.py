"""A prediction in the Trace Event Format, for ui.perfetto.dev: one process for a rank, one track for a stage. Pure."""

from __future__ import annotations

from typing import Any

from asyncfabric.sim import Prediction
from asyncfabric.sim.prediction import RECEIVER_LANES, TRAINER_LANES


def trace(prediction: Prediction, receivers: int) -> dict[str, Any]:
    """Return the trace; write it as JSON.

    Args:
        prediction: what to draw.
        receivers: ranks of one replica, to name them.
    """
    events: list[dict[str, Any]] = []
    first = 1
    for side, lanes in (("trainer", TRAINER_LANES), ("replica", RECEIVER_LANES)):
        count = prediction.activity[lanes[0]].shape[1]
        for rank in range(count):
            name = f"trainer {rank}" if side == "trainer" else f"replica {rank // receivers} rank {rank % receivers}"
            events.append({"ph": "M", "pid": first + rank, "name": "process_name", "args": {"name": name}})
            for track, lane in enumerate(lanes):
                place = {"pid": first + rank, "tid": track}
                events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": lane}})
                events += [
                    {
                        "ph": "X",
                        **place,
                        "name": lane,
                        "ts": span.begin_s * 1e6,
                        "dur": (span.end_s - span.begin_s) * 1e6,
                    }
                    for span in prediction.spans(lane, rank)
                ]
        first += count
    return {"displayTimeUnit": "ms", "traceEvents": events}

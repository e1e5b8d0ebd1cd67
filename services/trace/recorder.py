"""Recording a running node: `/trace?seconds=5` switches its trace points on, waits, and answers with a recording.

On the event loop. Off otherwise, and nothing is kept. One recording at a time: a second one would take the events of
the first. `/clock` reports the node's clock, so that recordings of several hosts can be laid over each other.
"""

from __future__ import annotations

import time

import msgspec
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asyncfabric import Fabric
from asyncfabric.errors import BusyError, FabricError
from asyncfabric.observe.spans import SpanRing
from asyncfabric.observe.tap import TraceTap
from asyncfabric.observe.trace import Recording, boot_id
from asyncfabric_services.quantities import parse_duration

MOST_SECONDS = 60.0
DRAIN_SECONDS = 0.05  # often enough for 80,000 events per second of the fabric


class Recorder:
    """Records one node; `fabric` is None for nodes without one."""

    def __init__(self, name: str, spans: SpanRing, fabric: Fabric | None = None) -> None:
        self._name = name
        self._spans = spans
        self._fabric = fabric
        self._busy = False

    async def record(self, seconds: float) -> Recording:
        """Return what happens within the next seconds; raises BusyError while another recording is made.

        Cancellation: the trace is off again.
        """
        if self._busy:
            raise BusyError("another recording of this node is being made", remedy="wait for its end")
        self._busy = self._spans.on = True
        tap = None
        try:
            self._spans.take()  # what was left by a recording that was given up
            if self._fabric is not None:
                self._fabric.set_trace(True)
                tap = TraceTap(self._fabric.take_trace)
            end = trio.current_time() + seconds
            while (left := end - trio.current_time()) > 0:
                await trio.sleep(left if tap is None else min(left, DRAIN_SECONDS))
                if tap is not None:
                    tap.drain()
            events, gaps = ([*tap.events], tap.gaps) if tap is not None else ([], 0)
            return Recording.here(self._name, events, self._spans.take(), gaps)
        finally:
            self._busy = self._spans.on = False
            if self._fabric is not None and not self._fabric.closed:
                self._fabric.set_trace(False)

    def routes(self) -> list[Route]:
        """Return `/trace` and `/clock`."""
        return [Route("/trace", self._trace, methods=["GET"]), Route("/clock", self._clock, methods=["GET"])]

    async def _trace(self, request: Request) -> Response:
        try:
            seconds = parse_duration(request.query_params.get("seconds", ""))
            if not 0 < seconds <= MOST_SECONDS:
                raise ValueError(f"expected more than 0 and at most {MOST_SECONDS:g}, got {seconds:g}")
        except ValueError as error:
            return JSONResponse({"error": f"seconds: {error}"}, 400)
        try:
            recording = await self.record(seconds)
        except BusyError as error:
            return JSONResponse({"error": str(error)}, 409)
        except FabricError as error:
            return JSONResponse({"error": str(error)}, 503)
        body = await trio.to_thread.run_sync(msgspec.json.encode, recording)
        return Response(body, media_type="application/json")

    async def _clock(self, _: Request) -> Response:
        return JSONResponse({"host": boot_id(), "monotonic_ns": time.monotonic_ns()})

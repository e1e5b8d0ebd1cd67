"""Which streams calls on GPU tensors run on, and in which order: the communication stream, and launches of an exchange.

Runs on the thread that calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from asyncfabric.integrations.deep_ep.events import EventHandle, EventOverlap


def capturing_beside(captured: Iterable[bool]) -> bool:
    """Return whether a graph is being captured; `captured` states it for each step that is open.

    Raises:
        ValueError: a step was dispatched on the other side of the capture's begin.
    """
    capturing: bool = torch.cuda.is_current_stream_capturing()
    if any(each != capturing for each in captured):
        where = "before the capture" if capturing else "in a capture"
        raise ValueError(f"a step that was dispatched {where} was not combined; a graph holds whole steps")
    return capturing


class LaunchOrder:
    """Keeps the launches of an exchange in the order of the calls, whatever streams they are on.

    A graph's launches are ordered by whoever replays it: between a capture and what is outside nothing is waited for.
    """

    def __init__(self) -> None:
        """No launch yet."""
        self._last: tuple[int, torch.cuda.Event, bool] | None = None

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Launch inside, on the current stream."""
        stream, capturing = torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()
        if self._last is not None:
            place, event, captured = self._last
            if place != stream.cuda_stream and captured == capturing:
                stream.wait_event(event)
        yield
        self._last = stream.cuda_stream, stream.record_event(), capturing


class CommStream:
    """The communication stream of a buffer.

    Attributes:
        stream: of CUDA, of high priority.
    """

    def __init__(self, device: torch.device) -> None:
        """Make a stream of a device."""
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def begin(self, previous: EventOverlap | None, inputs: Iterable[torch.Tensor | None]) -> torch.cuda.Stream:
        """Let the communication stream wait for an event, or for the current stream; returns the current stream."""
        current = torch.cuda.current_stream(self.stream.device)
        handle = previous.event if previous is not None else None
        if handle is not None and handle.event is not None:
            self.stream.wait_event(handle.event)
        else:
            self.stream.wait_stream(current)
        for tensor in inputs:
            if tensor is not None:
                tensor.record_stream(self.stream)
        return current

    def end(
        self, current: torch.cuda.Stream, outputs: Iterable[torch.Tensor | None], *, async_finish: bool
    ) -> EventOverlap:
        """Return the event that ends the work; without `async_finish` the current stream waits for it already."""
        with torch.cuda.stream(self.stream):
            handle = EventHandle()
        for tensor in outputs:
            if tensor is not None:
                tensor.record_stream(current)
        if async_finish:
            return EventOverlap(handle)
        assert handle.event is not None
        current.wait_event(handle.event)
        return EventOverlap()


def check_streams(previous_event: object, *, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    """Raise ValueError where tensors cannot be allocated on the communication stream, as DeepEP does."""
    if allocate_on_comm_stream and not (previous_event is not None and async_finish):
        raise ValueError("allocate_on_comm_stream=True needs a previous_event and async_finish=True")


@dataclass
class CommWork:
    """The work of one call of ElasticBuffer.

    Attributes:
        outputs: tensors that the call returns or keeps; filled by the call.
        event: that ends the work; there once the work is on its stream.
    """

    outputs: list[torch.Tensor | None] = field(default_factory=list)
    event: EventOverlap = field(default_factory=EventOverlap)


@dataclass(frozen=True)
class ElasticOrder:
    """How a call of ElasticBuffer is ordered among streams; the arguments of DeepEP's interface.

    Attributes:
        previous_event: that the work waits for, in place of the current stream.
        previous_event_before_epilogue: that the work waits for as well.
        async_with_compute_stream: the current stream does not wait for the work.
        allocate_on_comm_stream: tensors are made on the communication stream, which is so anyway.
    """

    previous_event: EventHandle | EventOverlap | None = None
    previous_event_before_epilogue: EventHandle | EventOverlap | None = None
    async_with_compute_stream: bool = False
    allocate_on_comm_stream: bool = False

    def __post_init__(self) -> None:
        """Refuse what DeepEP refuses."""
        if self.previous_event is not None and not self.allocate_on_comm_stream:
            raise ValueError("previous_event needs allocate_on_comm_stream=True")

    @contextmanager
    def on_comm(self, comm: CommStream | None, inputs: Iterable[torch.Tensor | None]) -> Iterator[CommWork]:
        """Put what is done inside on the communication stream; None: tensors are on a host, nothing is ordered."""
        work = CommWork()
        if comm is None:
            yield work
            return
        current = comm.begin(_overlap(self.previous_event), inputs)
        before = _overlap(self.previous_event_before_epilogue)
        with torch.cuda.stream(comm.stream):
            if before is not None:
                before.current_stream_wait()
            yield work
        work.event = comm.end(current, work.outputs, async_finish=self.async_with_compute_stream)


def _overlap(event: EventHandle | EventOverlap | None) -> EventOverlap | None:
    return EventOverlap(event) if isinstance(event, EventHandle) else event

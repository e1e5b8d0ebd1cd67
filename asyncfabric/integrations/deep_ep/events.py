"""Events of DeepEP's interface: CUDA events where work is on a GPU, nothing where it is done when a call returns.

Any thread.
"""

from __future__ import annotations

from typing import Any

import torch


class EventHandle:
    """What has been put on the current stream up to now; without a GPU in use there is nothing to wait for."""

    def __init__(self) -> None:
        """Record it."""
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.event: torch.cuda.Event | None = torch.cuda.current_stream().record_event() if in_use else None

    def current_stream_wait(self) -> None:
        """Let the current stream wait for it; the host goes on."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An event, and the tensors that must live until it has come."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        """Take an event, or None for work that is done."""
        self.event: EventHandle | None = event
        self.extra_tensors: tuple[Any, ...] | None = extra_tensors

    def current_stream_wait(self) -> None:
        """Let the current stream wait for it; returns at once where there is no event."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        """Return itself: what is put on streams inside runs beside the work that the event ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the current stream wait for it."""
        self.current_stream_wait()


def refuse(place: str, **given: Any) -> None:
    """Raise ValueError for arguments that are not there in a place, such as "on a host"."""
    for name, value in given.items():
        if value is not None and value is not False and value != 0:
            raise ValueError(f"{name}={value!r} is not there {place}; see the table in docs/guide/moe.md")

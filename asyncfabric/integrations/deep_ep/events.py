"""Events of DeepEP's interface: CUDA events where work is on a GPU, nothing where it is done when a call returns.

Any thread.
"""

from __future__ import annotations

from collections.abc import Callable
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
        self.hook_after_wait: Callable[[], object] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait for it, then call the hook; returns at once where there is no event.

        Args:
            release_handle: forget the event afterwards.
        """
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Have the next `current_stream_wait` call a function once.

        Raises:
            ValueError: there is one already.
        """
        if self.hook_after_wait is not None:
            raise ValueError("this event has a hook already; wait for it first")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Return itself for a `with` at whose end the event is forgotten, where `release_handle` is true."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        """Return itself: what is put on streams inside runs beside the work that the event ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the current stream wait for it."""
        release, self._release = self._release, False
        self.current_stream_wait(release)


def refuse(place: str, **given: Any) -> None:
    """Raise ValueError for arguments that are not there in a place, such as "on a host"."""
    for name, value in given.items():
        if value is not None and value is not False and value != 0:
            raise ValueError(f"{name}={value!r} is not there {place}; see the table in docs/guide/moe.md")

"""What DeepEP's interface names and a host has not: events, tuning; and refusing what cannot be done. Any thread."""

from __future__ import annotations

from typing import Any


class EventOverlap:
    """What stands for an event: work on a host is done when a call returns, so waiting for it is nothing."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        """Take what DeepEP's takes."""
        self.event: Any = event

    def current_stream_wait(self) -> None:
        """Return at once."""

    def __enter__(self) -> EventOverlap:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class Config:
    """Tuning of kernels; taken and not used."""

    def __init__(self, *numbers: int) -> None:
        """Take what DeepEP's takes."""
        self.numbers: tuple[int, ...] = numbers


def refuse(**given: Any) -> None:
    """Raise ValueError for arguments that are not there on a host."""
    for name, value in given.items():
        if value is not None and value is not False and value != 0:
            raise ValueError(f"{name}={value!r} is not there on a host; see the table in docs/guide/moe.md")

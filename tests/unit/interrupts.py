"""Ctrl-C at every place where Python looks for signals: after a call into C, at a function's start, at a jump back.

CPython 3.11 to 3.13 raise KeyboardInterrupt at these places only, so trying each of them tries all that can happen.
"""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "ENTER_EXECUTOR")


class CtrlC:
    """Interrupts the `place`-th time that code of the package looks for signals, while it is entered."""

    def __init__(self, place: int, package: str) -> None:
        self.left: int = place
        self.came: bool = False
        self._package = package
        self._last: dict[FrameType, str] = {}
        self._names: dict[Any, dict[int, str]] = {}

    def __enter__(self) -> CtrlC:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if event == "call":
            if self._package not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "return":
            self._last.pop(frame, None)
            if frame.f_back is not None:
                self._last[frame.f_back] = ""  # coming back from a Python function, nobody looks
        elif event == "opcode":
            before = self._last.get(frame, "")
            self._last[frame] = self._name(frame)
            if before.startswith(_LOOKS):
                self.left -= 1
                if self.left < 0 and not self.came:
                    self.came = True
                    handler = signal.getsignal(signal.SIGINT)
                    assert callable(handler)
                    handler(signal.SIGINT, frame)
        return self._trace

    def _name(self, frame: FrameType) -> str:
        names = self._names.get(frame.f_code)
        if names is None:
            names = self._names[frame.f_code] = {one.offset: one.opname for one in dis.get_instructions(frame.f_code)}
        return names.get(frame.f_lasti, "")


def at_every_place(attempt: Callable[[CtrlC], None], package: str = "/asyncfabric/") -> int:
    """Call `attempt` with an interrupt at one place after the other until none is left; returns how many there were."""
    for place in range(100_000):
        press = CtrlC(place, package)
        attempt(press)
        if not press.came:
            return place
    raise AssertionError("it never ends")

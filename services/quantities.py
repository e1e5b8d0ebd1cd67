"""Sizes and durations as people write them: `64KiB`, `1.5GiB`, `30s`, `250ms`; and the click types for them.

Pure functions. Powers of ten and of two are distinguished: `1MB` is 1,000,000 bytes, `1MiB` is 1,048,576; `64K` alone
means 1,024 each, as in dd and fio.
"""

from __future__ import annotations

import math
import re

import click

_SIZE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def _split(text: str, units: dict[str, int] | dict[str, float], what: str) -> tuple[float, float]:
    match = _QUANTITY.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in units:
        known = ", ".join(name for name in units if name)
        raise ValueError(f"{text!r} is not a {what}: expected a number and a unit out of {known}")
    number = float(match[1])
    if math.isinf(number * units[unit]):
        raise ValueError(f"{text[:40]!r}... is no {what}: it is beyond all numbers")
    return number, units[unit]


def parse_size(text: str) -> int:
    """Return bytes; raises ValueError naming the text."""
    number, unit = _split(text, _SIZE_UNITS, "size")
    value = number * unit
    if value != math.floor(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_duration(text: str) -> float:
    """Return seconds; raises ValueError naming the text."""
    number, unit = _split(text, _DURATION_UNITS, "duration")
    return number * unit


def format_size(value: int) -> str:
    """Return the shortest exact form with binary units."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit and value % unit == 0:
            return f"{value // unit} {name}"
    return f"{value} B"


class SizeType(click.ParamType[int]):
    """A click type for sizes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse, or fail as a usage error."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SizeListType(click.ParamType[tuple[int, ...]]):
    """A click type for lists of sizes, separated by commas."""

    name = "size[,size...]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse, or fail as a usage error."""
        if isinstance(value, tuple):
            return value
        try:
            sizes = tuple(parse_size(part) for part in str(value).split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not sizes:
            self.fail("at least one size is needed", param, ctx)
        return sizes


class DurationType(click.ParamType[float]):
    """A click type for durations."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse, or fail as a usage error."""
        if isinstance(value, float | int):
            return float(value)
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)

"""Logging of a program: text for people or one JSON object per line, on standard error. The library installs nothing.

Extra fields given by `extra={"fields": {...}}` become keys of the JSON object, and `key=value` in text.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal, TextIO

from asyncfabric_services.terminal import plain

Form = Literal["text", "json"]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", {})
    return fields if isinstance(fields, dict) else {}


class JsonLines(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, message, error, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        reported: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            reported["error"] = self.formatException(record.exc_info)
        return json.dumps({**_fields(record), **reported}, default=str)


class TextLines(logging.Formatter):
    """A line for people, fields at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name is logging's
        """Return the first line: one, whatever others have put into it."""
        shown = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return plain(super().formatMessage(record) + shown)


def open_log(level: str, form: Form, stream: TextIO | None = None) -> logging.Handler:
    """Send the log of this program to `stream` (standard error); call it once, from the program and not from a library.

    Raises ValueError for a level that logging does not know.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level must be one of debug, info, warning, error, got {level!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(number)
    if number > logging.DEBUG:
        logging.getLogger("httpx2").setLevel(max(number, logging.WARNING))  # it has a line for each request of a store
    return handler

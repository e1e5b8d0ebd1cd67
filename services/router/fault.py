"""Errors as the OpenAI API writes them, with their HTTP status; and which of our errors becomes which. Pure."""

from __future__ import annotations

from typing import Any

from asyncfabric.errors import BrokenError, BusyError, ClosedError, FabricError

RETRY_SECONDS = 1
MOST_QUOTED = 1000  # characters of a message: what a request contains is quoted, and may be megabytes


class ApiFault(Exception):
    """A request that cannot be served.

    Attributes:
        status: of the HTTP answer.
        kind: `type` of the error object.
        code: for programs, perhaps None.
        param: the field of the request that is wrong, perhaps None.
        retry_after: seconds after which to try again, None when that is of no use.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def plain(self) -> dict[str, Any]:
        """Return the body of the answer."""
        param = None if self.param is None else _sayable(self.param)
        return {"error": {"message": _sayable(str(self)), "type": self.kind, "param": param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that go with it."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def _sayable(text: str) -> str:
    """Return at most MOST_QUOTED characters; halves of surrogate pairs, which are JSON but not UTF-8, are escaped."""
    cut = text if len(text) <= MOST_QUOTED else f"{text[: MOST_QUOTED - 3]}..."
    return cut.encode(errors="backslashreplace").decode()


def overloaded(message: str, retry_seconds: int = RETRY_SECONDS) -> ApiFault:
    """Return the answer to a request that is one too many."""
    return ApiFault(429, message, kind="rate_limit_error", code="overloaded", retry_after=retry_seconds)


def not_ready(state: str) -> ApiFault:
    """Return the answer of a node that is starting, going away or broken; `state` is the error's code."""
    message = f"this node is {state} and takes no new requests: ask again, another node will answer"
    return ApiFault(503, message, kind="server_error", code=state, retry_after=RETRY_SECONDS)


def drained() -> ApiFault:
    """Return the answer to a request that the drain deadline cut off."""
    message = "the node was stopped before the answer was complete: ask again, another node will answer"
    return ApiFault(503, message, kind="server_error", code="draining", retry_after=RETRY_SECONDS)


def deadline_passed(seconds: float, tokens: int) -> ApiFault:
    """Return the answer to a request that took too long."""
    message = f"the request's deadline of {seconds:g} s passed after {tokens} tokens: ask for fewer, or allow more time"
    return ApiFault(504, message, kind="server_error", code="deadline_exceeded")


def body_late(seconds: float) -> ApiFault:
    """Return the answer to a client that was too slow to send its request."""
    return ApiFault(408, f"the body did not come within the request's deadline of {seconds:g} s", code="body_late")


def bodies_full(held: int, most: int) -> ApiFault:
    """Return the answer to a long body that comes while others hold the room for bodies."""
    message = f"long bodies of {held} bytes are being read, and {most} is the most: try again, or send a shorter one"
    return ApiFault(503, message, kind="server_error", code="overloaded", retry_after=RETRY_SECONDS)


def fault_of(error: BaseException) -> ApiFault | None:
    """Return what to answer when a backend raised `error`; None for an error that nobody foresaw."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, ApiFault):
        return error
    if isinstance(error, BusyError):
        return overloaded(str(error))
    if isinstance(error, ClosedError):
        return not_ready("draining")
    if isinstance(error, BrokenError | FabricError):
        return ApiFault(502, str(error), kind="server_error", code="backend_failed")
    if isinstance(error, ValueError):
        return ApiFault(400, str(error))
    return None

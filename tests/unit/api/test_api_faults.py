"""Each native status becomes the exception whose class states how much is broken, with context and a remedy."""

from __future__ import annotations

import anyio
import pytest

import asyncfabric as af
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import Completion, CompletionKind, EngineStatusError, StatusKind
from asyncfabric._bridge.status import StatusCode, refusal

EXPECTED: dict[StatusCode, type[Exception]] = {
    StatusCode.BUSY: af.BusyError,
    StatusCode.CLOSED: af.ClosedError,
    StatusCode.CANCELLED: af.TransferError,
    StatusCode.INVALID_ARGUMENT: ValueError,
    StatusCode.OUT_OF_BOUNDS: ValueError,
    StatusCode.STALE_KEY: af.StaleKeyError,
    StatusCode.ACCESS_DENIED: af.TransferError,
    StatusCode.TRANSPORT: af.TransferError,
    StatusCode.AMBIGUOUS: af.TransferError,
    StatusCode.DRAIN_TIMEOUT: af.TransferError,
    StatusCode.UNSUPPORTED: af.TransferError,
    StatusCode.PEER_DEAD: af.PeerError,
    StatusCode.PEER_UNREACHABLE: af.PeerError,
    StatusCode.PEER_REJECTED: af.PeerError,
    StatusCode.RAIL_DOWN: af.DeviceError,
    StatusCode.NO_MEMORY: af.DeviceError,
    StatusCode.NO_PROVIDER: af.DeviceError,
    StatusCode.TIMEOUT: af.TransferError,
    StatusCode.INTERNAL: af.InternalError,
    StatusCode.UNCONFIRMED: af.BusyError,
    StatusCode.NOT_TAKEN: af.TransferError,
    StatusCode.SECRET_REFUSED: af.PeerError,
}
FIXTURE = faults.FailedCall("write of 64 bytes", "<Peer 3>", done=16, total=64)


def test_every_code_is_translated() -> None:
    assert set(EXPECTED) == set(StatusCode) - {StatusCode.OK}


@pytest.mark.parametrize(("code", "kind"), EXPECTED.items(), ids=lambda value: getattr(value, "name", ""))
def test_a_refused_call_and_a_failed_completion_state_the_same(code: StatusCode, kind: type[Exception]) -> None:
    completion = Completion(1, CompletionKind.OP, code, code.kind, 110, 0, 16, 0, 0, 3)
    for error in (
        faults.refused(refusal(code, "the detail", 110), FIXTURE),
        faults.failed(completion, FIXTURE, "the detail"),
    ):
        assert type(error) is kind
        text = str(error)
        for part in ("write of 64 bytes to <Peer 3>", code.text, "the detail", "16 of 64 bytes had left", "timed out"):
            assert part in text
        assert text.count(code.text) == 1
        if isinstance(error, af.FabricError):
            assert error.raw == 110
            assert error.remedy and error.remedy in text
        if isinstance(error, af.TransferError | af.PeerError):
            assert error.bytes == 16


def test_errors_are_those_that_anyio_programs_catch() -> None:
    assert issubclass(af.BusyError, anyio.WouldBlock)
    assert issubclass(af.ClosedError, anyio.ClosedResourceError)
    assert issubclass(af.PeerError, anyio.BrokenResourceError) and issubclass(af.TransferError, af.BrokenError)


def test_an_unknown_code_is_not_hidden() -> None:
    error = faults.refused(EngineStatusError(99, int(StatusKind.TRANSFER), -5, ""), faults.FailedCall("read"))
    assert isinstance(error, af.TransferError) and "unknown status 99" in str(error)
    error = faults.refused(EngineStatusError(99, 77, 0), faults.FailedCall("read"))
    assert isinstance(error, af.InternalError)


def test_numbers_of_providers_that_are_no_errno_are_shown_as_they_are() -> None:
    error = faults.refused(refusal(StatusCode.TRANSPORT, raw=-4242), faults.FailedCall("read"))
    assert "[-4242]" in str(error)


@pytest.mark.parametrize(("handle", "text"), [(3, "3"), ((1 << 32) | 3, "3"), ((7 << 32) | 3, "3.7")])
def test_ids_are_short(handle: int, text: str) -> None:
    assert faults.short_id(handle) == text

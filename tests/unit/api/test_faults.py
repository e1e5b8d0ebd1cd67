"""From a status to an exception: the class follows the kind, the text states what, to whom, how much and what to do."""

from __future__ import annotations

import errno
import os

import pytest

from asyncfabric import errors
from asyncfabric._bridge import faults
from asyncfabric._bridge.engine import Completion, EngineStatusError, StatusKind
from asyncfabric._bridge.status import StatusCode, refusal

CLASSES: dict[StatusKind, type[Exception]] = {
    StatusKind.BUSY: errors.BusyError,
    StatusKind.CLOSED: errors.ClosedError,
    StatusKind.CANCELLED: errors.TransferError,
    StatusKind.VALUE: ValueError,
    StatusKind.STALE: errors.StaleKeyError,
    StatusKind.TRANSFER: errors.TransferError,
    StatusKind.PEER: errors.PeerError,
    StatusKind.DEVICE: errors.DeviceError,
    StatusKind.INTERNAL: errors.InternalError,
}
FAILURES = [code for code in StatusCode if code is not StatusCode.OK]


def ended(code: int, kind: int, raw: int = 0) -> Completion:
    """Return a completion with a status."""
    return Completion(1, 0, code, kind, raw, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("code", FAILURES, ids=lambda code: code.name)
def test_the_kind_decides_the_class(code: StatusCode) -> None:
    call = faults.FailedCall("write of 8 bytes", "peer 3", 4, 8)
    for error in (
        faults.failed(ended(code, code.kind), call),
        faults.refused(refusal(code), call),
    ):
        assert type(error) is CLASSES[code.kind]
        assert code.text in str(error)
        assert str(error).startswith("write of 8 bytes to peer 3: ")
        assert "at least 4 of 8 bytes had left" in str(error)
        if isinstance(error, errors.FabricError):
            assert error.remedy, f"{code.name} reports nobody what to do"
        if isinstance(error, (errors.TransferError, errors.PeerError)):
            assert error.bytes == 4


def test_numbers_of_the_system_are_spelled_out() -> None:
    call = faults.FailedCall("write")
    assert "Connection reset" in str(faults.failed(ended(8, 6, -errno.ECONNRESET), call))
    assert "[-70000]" in str(faults.failed(ended(8, 6, -70000), call))
    assert "[" not in str(faults.failed(ended(8, 6), call)).partition(" (")[0]


@pytest.mark.parametrize("detail", ["the transport reported an error: lane 2", "lane 2"])
def test_a_detail_follows_the_sentence_once(detail: str) -> None:
    text = str(faults.failed(ended(8, 6), faults.FailedCall("write"), detail))
    assert text.startswith("write: the transport reported an error: lane 2")


def test_numbers_of_the_gpu_driver_are_no_numbers_of_the_system() -> None:
    call = faults.FailedCall("write")
    named = "cuMemSetAccess: CUDA_ERROR_INVALID_DEVICE (101)"
    assert "[" not in str(faults.failed(ended(8, 6, 101), call, named)), "101 is the driver's, not ENETUNREACH"
    assert "[" not in str(faults.failed(ended(8, 6, faults.CUDA_RAW + 101), call, named))
    assert "[" not in str(faults.failed(ended(8, 6, -101), call, "fi_write: it is not connected (-101)"))
    assert "the rail went down [CUDA driver error 1]" in str(faults.failed(ended(15, 8, faults.CUDA_RAW + 1), call))
    assert f"[101: {os.strerror(101)}]" in str(faults.failed(ended(8, 6, 101), call, "lane 1"))


def test_statuses_that_nobody_knows_are_our_fault() -> None:
    error = faults.failed(ended(4711, 4711), faults.FailedCall("write"))
    assert type(error) is errors.InternalError
    assert "unknown status 4711" in str(error)


def test_a_refusal_without_a_text_still_speaks() -> None:
    error = faults.refused(EngineStatusError(1, 1, 0), faults.FailedCall("write"))
    assert type(error) is errors.BusyError
    assert "full" in str(error)


@pytest.mark.parametrize(("imm", "states"), [(None, "every immediate"), (5, "imm 5 is open already")])
def test_busy_counters_have_their_own_words(imm: int | None, states: str) -> None:
    error = faults.counter_refused(refusal(StatusCode.BUSY), imm)
    assert isinstance(error, errors.BusyError)
    assert states in str(error)


@pytest.mark.parametrize(("imm", "states"), [(None, "or one whose close"), (5, "of imm 5")])
def test_a_counter_that_waits_for_a_peer_is_not_reported_as_open(imm: int | None, states: str) -> None:
    error = faults.counter_refused(refusal(StatusCode.UNCONFIRMED), imm)
    assert isinstance(error, errors.BusyError)
    assert states in str(error) and "not confirmed" in str(error) and "open already" not in str(error)


def test_other_refused_counters_are_refusals_like_any() -> None:
    assert isinstance(faults.counter_refused(refusal(StatusCode.CLOSED), 5), errors.ClosedError)
    assert isinstance(faults.counter_refused(refusal(StatusCode.INVALID_ARGUMENT), 5), ValueError)


@pytest.mark.parametrize(
    ("completion", "states"), [(None, "the peer is lost"), (ended(12, 7, -104), "died or stopped answering")]
)
def test_a_lost_peer_is_named_with_what_waited(completion: Completion | None, states: str) -> None:
    error = faults.peer_lost("wait for 5", "<Peer 3>", completion)
    assert str(error).startswith("wait for 5, and <Peer 3> ")
    assert states in str(error)
    assert error.raw == (completion.raw if completion else 0)

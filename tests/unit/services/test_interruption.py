"""Failures in groups become the error that a command ends with."""

from __future__ import annotations

import pytest

from asyncfabric.errors import ClosedError, PeerError
from asyncfabric_services.interruption import failing_as

RULES = ((PeerError, lambda error: LookupError(str(error))), ((OSError, EOFError), lambda error: error))
LOST, BROKEN = PeerError("it is gone"), OSError("broken")


@pytest.mark.parametrize("raised", [LOST, ExceptionGroup("", [ExceptionGroup("", [LOST]), PeerError("later")])])
def test_failures_of_a_kind_become_another_one(raised: Exception) -> None:
    with pytest.raises(LookupError, match="it is gone"), failing_as(*RULES):
        raise raised


def test_a_failure_may_come_out_bare_as_it_is() -> None:
    with pytest.raises(OSError, match="broken") as found, failing_as(*RULES):
        raise ExceptionGroup("", [BROKEN])
    assert found.value is BROKEN


@pytest.mark.parametrize(
    "raised",
    [ClosedError("other"), ExceptionGroup("", [LOST, ClosedError("other")]), ExceptionGroup("", [LOST, BROKEN])],
)
def test_failures_of_several_kinds_stay_as_they_are(raised: Exception) -> None:
    with pytest.raises(type(raised)) as found, failing_as(*RULES):
        raise raised
    assert found.value is raised


def test_an_interrupt_passes() -> None:
    with pytest.raises(BaseExceptionGroup), failing_as(*RULES):
        raise BaseExceptionGroup("", [LOST, KeyboardInterrupt()])

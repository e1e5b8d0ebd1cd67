"""The tree of errors: who can be caught as what, and what each carries. Programs rely on these bases."""

from __future__ import annotations

import inspect
import pickle

import anyio
import pytest

from asyncfabric import errors

BASES: dict[type[Exception], tuple[type[Exception], ...]] = {
    errors.BusyError: (errors.FabricError, anyio.WouldBlock),
    errors.ClosedError: (errors.FabricError, anyio.ClosedResourceError),
    errors.BrokenError: (errors.FabricError, anyio.BrokenResourceError),
    errors.TransferError: (errors.BrokenError,),
    errors.PeerError: (errors.BrokenError,),
    errors.DeviceError: (errors.BrokenError,),
    errors.ProtocolError: (errors.FabricError,),
    errors.LocalProtocolError: (errors.ProtocolError,),
    errors.RemoteProtocolError: (errors.ProtocolError,),
    errors.StaleKeyError: (errors.FabricError,),
    errors.ActorError: (errors.FabricError,),
    errors.ActorDied: (errors.ActorError,),
    errors.RemoteError: (errors.ActorError,),
    errors.InternalError: (errors.FabricError,),
    errors.FabricError: (Exception,),
}


def test_the_tree_is_complete() -> None:
    public = {one for _, one in inspect.getmembers(errors, inspect.isclass) if one.__module__ == errors.__name__}
    assert public == set(BASES)


@pytest.mark.parametrize("error", BASES)
def test_every_error_has_its_bases_and_carries_remedy_and_number(error: type[errors.FabricError]) -> None:
    assert error.__bases__ == BASES[error]
    raised = error("it broke", remedy="mend it", raw=-110)
    assert (raised.remedy, raised.raw, raised.args) == ("mend it", -110, ("it broke",))
    assert str(raised) == "it broke (mend it)"
    plain = error("it broke")
    assert (str(plain), plain.remedy, plain.raw) == ("it broke", "", 0)


@pytest.mark.parametrize("error", [errors.TransferError, errors.PeerError])
def test_broken_transfers_state_how_much_had_left(error: type[errors.TransferError]) -> None:
    assert error("it broke", bytes=4096).bytes == 4096
    assert error("it broke").bytes == 0


@pytest.mark.parametrize("error", BASES)
def test_errors_travel_between_processes(error: type[errors.FabricError]) -> None:
    sent = error("it broke", remedy="mend it", raw=7)
    got = pickle.loads(pickle.dumps(sent))
    assert (type(got), str(got), got.raw) == (error, str(sent), 7)

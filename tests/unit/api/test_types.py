"""Values that cross layers: frozen, and a Statistics that answers by name."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from asyncfabric.types import PeerStatistics, RailInfo, Statistics, TransferResult, Waiting

VALUES = [
    TransferResult(4096, 0.5, (0, 1)),
    RailInfo("local", "", "", "", 0.0, True, True, True),
    PeerStatistics(1, 2, "connected", 1, "local", 0, 0),
    Statistics({"stale_arrivals": 3}),
    Waiting("task", "counter 5", 1, 2),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_cannot_be_changed(value: object) -> None:
    assert dataclasses.is_dataclass(value)
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
        setattr(value, dataclasses.fields(value)[0].name, None)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_can_be_copied_and_sent(value: object) -> None:
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


def test_statistics_answer_by_name() -> None:
    statistics = Statistics({"stale_arrivals": 3})
    assert statistics.stale_arrivals == 3
    assert statistics.peers == ()
    with pytest.raises(AttributeError, match="no_such_counter"):
        _ = statistics.no_such_counter

"""The public conformance suite: what every fabric must do, whatever connects its processes.

Every provider of this package and the fake engine pass it; so can yours, in your own pytest, in three lines::

    factory = conformance.FabricFactory(open=lambda: asyncfabric.open_fabric(my_config), name="mine")

    @pytest.mark.parametrize("check", conformance.SUITE, ids=conformance.name_of)
    def test_mine(check): conformance.run(check, factory)

A check is an async function of a FabricFactory. It raises AssertionError when the fabric is wrong and
`unittest.SkipTest` when a capability is missing; `run` adds the deadline, since most ways of being wrong are hangs.
"""

from __future__ import annotations

from types import ModuleType

from asyncfabric.testing.conformance import (
    boxes,
    cancellation,
    counts,
    integrity,
    keys,
    messages,
    observing,
    pages,
    queues,
    reading,
    scattering,
)
from asyncfabric.testing.conformance.setting import Check, FabricFactory, name_of, run


def _checks_of(room: ModuleType) -> list[Check]:
    return [value for name, value in vars(room).items() if name.startswith("check_")]


SUITE: list[Check] = [
    check
    for room in (integrity, counts, pages, boxes, scattering, queues, cancellation, keys, messages, reading, observing)
    for check in _checks_of(room)
]
"""All checks, cheap ones first."""

__all__ = ["SUITE", "Check", "FabricFactory", "name_of", "run"]

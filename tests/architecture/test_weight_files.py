"""The files of asyncfabric.weights that each role reaches: few enough to read.

A file reaches what it imports, and what that imports, within asyncfabric.weights. Imports within functions, which wait
for a GPU or for torch, are counted apart; imports under TYPE_CHECKING are not followed. Doors (`__init__.py`) run on
the way to every file and are not counted.
"""

from __future__ import annotations

import pytest
from import_graph import Graph, graph_of, python_files, reached

MOST = {"sender.publisher": 30, "receiver.replica": 32, "coordinator.coordinator": 20}
"""Other files that the first file of a role reaches at import."""

MOST_LATER = 8
"""Further files that it reaches by imports within functions: five of GPUs, those of torch's tensors."""


@pytest.fixture(scope="module")
def weights() -> Graph:
    texts = python_files("asyncfabric/weights", "asyncfabric.weights")
    assert len(texts) > 40, "the walk over the sources found next to nothing"
    return graph_of(texts)


@pytest.mark.parametrize("role", MOST)
def test_a_role_reaches_few_files(weights: Graph, role: str) -> None:
    first = f"asyncfabric.weights.{role}"
    at_once, all_ = reached(weights, first, False), reached(weights, first, True)
    assert len(at_once) <= MOST[role], sorted(at_once)
    assert len(all_ - at_once) <= MOST_LATER, sorted(all_ - at_once)

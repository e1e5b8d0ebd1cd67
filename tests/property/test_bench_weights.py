"""Ring 2: what trainers of `bench weights` hold, put together, is the model that the reference is made of."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric_services.bench.weights_workload import FORMS, rows_at, rows_of


@given(
    trainers=st.integers(1, 12),
    side=st.integers(1, 200),
    number=st.integers(0, 5),
    form=st.sampled_from(sorted(FORMS)),
)
def test_shards_put_together_are_the_model(trainers: int, side: int, number: int, form: str) -> None:
    whole = rows_of(number, side, 0, side, 7, form)
    shards = [rows_of(number, side, *rows_at(rank, trainers, side), 7, form) for rank in range(trainers)]
    assert np.array_equal(np.concatenate(shards), whole)
    assert len(np.unique(whole)) > side // 4 or side < 8, "weights differ from each other"

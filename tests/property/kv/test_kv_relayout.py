"""The planner for random layouts: each target byte is written once, by the byte of the model that belongs there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncfabric.kv.layout import KvLayout
from asyncfabric.kv.relayout import KvPlan, context_rank, expected_arrivals, serves

POOL = 40


@st.composite
def cases(draw: Any) -> tuple[KvLayout, KvLayout, int, int, int]:
    order = draw(st.sampled_from(["HND", "NHD", "MLA"]))
    heads = 1 if order == "MLA" else draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    sizes = [size for size in (1, 2, 3, 4, 6, 8) if heads % size == 0 or size % heads == 0]
    shape = {"layers": draw(st.integers(1, 4)), "kv_heads": heads, "head_dim": draw(st.integers(1, 3)), "order": order}
    dtype = draw(st.sampled_from(["uint8", "float16", "float32"]))
    sides = [
        KvLayout(**shape, dtype=dtype, page_tokens=draw(st.integers(1, 9)), tp_size=draw(st.sampled_from(sizes)))
        for _ in range(2)
    ]
    return sides[0], sides[1], draw(st.integers(0, 30)), draw(st.integers(0, 9)), draw(st.integers(1, 30))


def model_bytes(layout: KvLayout, tokens: int) -> np.ndarray[Any, Any]:
    """What the whole model would hold: [layer][plane][head][token][bytes of an element row], each byte known."""
    shape = (layout.layers, layout.planes, layout.kv_heads, tokens, layout.head_dim * layout.itemsize)
    return np.random.default_rng(5).integers(0, 256, size=shape, dtype=np.uint8)


def pool_of(layout: KvLayout, whole: Any, table: Any) -> np.ndarray[Any, Any]:
    """The pool of one rank, filled from the whole model."""
    row = layout.head_dim * layout.itemsize
    pool = np.zeros((layout.layers, POOL, layout.page_bytes), np.uint8)
    shape = {
        "HND": (layout.planes, layout.local_heads, layout.page_tokens, row),
        "NHD": (layout.planes, layout.page_tokens, layout.local_heads, row),
        "MLA": (layout.planes, layout.local_heads, layout.page_tokens, row),
    }[layout.order]
    for token in range(whole.shape[3]):
        page, slot = divmod(token, layout.page_tokens)
        for layer in range(layout.layers):
            view = pool[layer, table[page]].reshape(shape)
            values = whole[layer, :, layout.first_head : layout.first_head + layout.local_heads, token]
            if layout.order == "NHD":
                view[:, slot] = values
            else:
                view[:, :, slot] = values
    return pool


@pytest.mark.slow
@settings(max_examples=80)
@given(cases())
def test_each_byte_is_written_once_by_the_right_byte(case: tuple[KvLayout, KvLayout, int, int, int]) -> None:
    source, target, tokens, rotation, chunk = case
    whole = model_bytes(source, tokens)
    shuffle = np.random.default_rng(7)
    tables = [shuffle.permutation(POOL) for _ in range(source.tp_size)]
    pools = [pool_of(source.at_rank(rank), whole, tables[rank]) for rank in range(source.tp_size)]
    for rank in range(target.tp_size):
        mine = target.at_rank(rank)
        table = shuffle.permutation(POOL)
        pool = np.zeros(target.layers * POOL * target.page_bytes, np.uint8)
        touched = np.zeros(len(pool), np.uint8)
        counts = np.zeros(target.layers, np.int64)
        for which in range(source.tp_size):
            plan = KvPlan(source.at_rank(which), mine, tokens, rotation)
            placed = plan.place(tables[which], table)
            flat = pools[which].reshape(-1)
            for layer in range(source.layers):
                done = 0
                for ready in [*range(0, tokens, chunk), tokens]:
                    runs = plan.runs_ready(ready)
                    batches = placed.batches(done, runs)
                    done = runs
                    assert plan.serves(layer) == serves(plan.source, mine, layer, rotation)
                    if not plan.serves(layer):
                        continue
                    for length, sources, targets in batches:
                        counts[layer] += len(sources)
                        for begin, to in zip(sources, targets, strict=True):
                            begin += layer * source.layer_bytes(POOL)
                            to += layer * target.layer_bytes(POOL)
                            pool[to : to + length] = flat[begin : begin + length]
                            touched[to : to + length] += 1
                assert done == plan.runs
        expected = pool_of(mine, whole, table).reshape(-1)
        needed = pool_of(mine, np.ones_like(whole), table).reshape(-1) != 0
        assert touched.max(initial=0) <= 1, "a byte was written twice"
        assert (touched[needed] == 1).all(), "a byte was never written"
        assert np.array_equal(pool[needed], expected[needed])
        assert counts.tolist() == expected_arrivals(source, mine, tokens, rotation).tolist()
        own = np.zeros((target.layers, POOL, target.page_bytes), np.uint8)
        own[:, table[: target.pages_for(tokens)]] = 1
        assert not touched[own.reshape(-1) == 0].any(), "a page was touched that is not in the block table"


@given(cases())
def test_replicas_share_the_load(case: tuple[KvLayout, KvLayout, int, int, int]) -> None:
    """Of the ranks with the same heads none serves more than its share, give or take one layer of each target."""
    source, target, _, rotation, _ = case
    for rank in range(target.tp_size):
        mine = target.at_rank(rank)
        served = [
            sum(serves(source.at_rank(which), mine, layer, rotation) for layer in range(source.layers))
            for which in range(source.tp_size)
            if which * source.kv_heads // source.tp_size in mine.heads
        ]
        if source.replicas > 1:
            assert max(served) - min(served) <= 1
    assert 0 <= context_rank(source, rotation) < source.tp_size


def test_adjacent_pieces_are_merged() -> None:
    """One piece per page where the layouts permit it, one per plane where heads are split, one per token row else."""
    sizes = {"layers": 1, "kv_heads": 8, "head_dim": 64, "page_tokens": 16, "dtype": "float16"}
    for order, target_size, pieces in (("HND", 1, 1), ("HND", 2, 2), ("NHD", 1, 1), ("NHD", 2, 32), ("HND", 8, 2)):
        source = KvLayout(**sizes, order=order)
        target = KvLayout(**sizes, order=order, tp_size=target_size)
        assert KvPlan(source, target, 160).pieces == 10 * pieces, (order, target_size)
    whole = KvLayout(layers=1, kv_heads=1, head_dim=576, page_tokens=16, dtype="bfloat16", order="MLA")
    assert KvPlan(whole, whole, 160).pieces == 10
    split = KvLayout(layers=1, kv_heads=1, head_dim=576, page_tokens=64, dtype="bfloat16", order="MLA", tp_size=4)
    assert KvPlan(whole, split, 160).pieces == 10


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "dtype", "order", "context_bytes", "model"])
def test_layouts_that_cannot_be_planned_are_refused_by_the_field(field: str) -> None:
    base = {"layers": 2, "kv_heads": 2, "head_dim": 4, "page_tokens": 4, "dtype": "float16"}
    other: dict[str, Any] = {"dtype": "float32", "order": "NHD", "model": "another"}
    source, target = KvLayout(**base), KvLayout(**(base | {field: other.get(field, 8)}))
    assert source.digest() != target.digest()
    with pytest.raises(ValueError, match=field):
        KvPlan(source, target, 4)
    assert KvLayout(**(base | {"page_tokens": 16, "tp_size": 2})).digest() == source.digest()

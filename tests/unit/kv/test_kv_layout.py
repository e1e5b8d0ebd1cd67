"""Layouts: sizes and offsets, what each rank keeps, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asyncfabric.kv import KvLayout

BASE: dict[str, Any] = {"layers": 2, "kv_heads": 8, "head_dim": 128, "page_tokens": 16, "dtype": "bfloat16"}


def test_sizes_of_a_known_model() -> None:
    layout = KvLayout(**BASE)
    assert layout.page_bytes == 2 * 8 * 16 * 128 * 2 == 64 * 1024
    assert layout.page_shape == (2, 8, 16, 128)
    assert layout.pool_bytes(10) == 2 * 10 * layout.page_bytes
    assert layout.page_offset(1, 3, 10) == 13 * layout.page_bytes
    assert [layout.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    half = KvLayout(**BASE, order="NHD", tp_size=2, tp_rank=1)
    assert half.page_shape == (2, 16, 4, 128) and half.heads == range(4, 8) and half.page_bytes == 32 * 1024
    latent = KvLayout(**(BASE | {"kv_heads": 1, "head_dim": 576}), order="MLA", tp_size=4, tp_rank=2)
    assert latent.page_shape == (16, 576) and latent.page_bytes == 16 * 576 * 2 and latent.replicas == 4


def test_more_ranks_than_heads_keep_one_head_each() -> None:
    layout = KvLayout(**(BASE | {"kv_heads": 2}), tp_size=8)
    assert [layout.at_rank(rank).heads for rank in range(8)] == [range(1)] * 4 + [range(1, 2)] * 4
    assert layout.replicas == 4 and layout.local_heads == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, r"layers must be in 1\.\.4096, got 0"),
        ({"head_dim": 70000}, r"head_dim must be in 1\.\.65536"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"order": "DNH"}, "order must be HND, NHD or MLA, got 'DNH'"),
        ({"tp_size": 4, "tp_rank": 4}, r"tp_rank must be in 0\.\.3"),
        ({"tp_size": 3}, "kv_heads 8 and tp_size 3: one must be a multiple"),
        ({"order": "MLA"}, "kv_heads must be 1, got 8"),
        ({"head_dim": 65536, "page_tokens": 65536}, "beyond 2 GiB"),
        ({"context_bytes": -1}, "context_bytes must be in 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KvLayout(**(BASE | change))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(BASE | change), type=KvLayout)


def test_bounds_of_pages() -> None:
    layout = KvLayout(**BASE)
    with pytest.raises(ValueError, match=r"layer must be in 0\.\.1, got 2"):
        layout.page_offset(2, 0, 4)
    with pytest.raises(ValueError, match=r"page must be in 0\.\.3, got -1"):
        layout.page_offset(0, -1, 4)
    with pytest.raises(ValueError, match="tokens must be 0 or more"):
        layout.pages_for(-1)


def test_what_both_sides_compare() -> None:
    layout = KvLayout(**BASE, model="abc")
    assert layout.difference(KvLayout(**(BASE | {"page_tokens": 64}), model="abc", tp_size=8, tp_rank=3)) is None
    other = KvLayout(**(BASE | {"head_dim": 64}), model="xyz")
    assert layout.difference(other) == "head_dim: 128 here, 64 there"
    assert layout.digest() != other.digest() and len(layout.digest()) == 32
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KvLayout) == layout

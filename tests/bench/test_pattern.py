"""What the bench believes of its data: the same bytes at both ends, and a check that sees a single wrong byte."""

from __future__ import annotations

import numpy as np
import pytest

from asyncfabric.bench.pattern import (
    CHUNK_BYTES,
    POISON,
    expect_pages,
    expect_prefix,
    first_difference,
    page_list,
    random_bytes,
    verdict,
)


def test_both_ends_make_the_same_bytes_from_a_seed() -> None:
    assert np.array_equal(random_bytes(10_001, 7), random_bytes(10_001, 7))
    assert not np.array_equal(random_bytes(10_001, 7), random_bytes(10_001, 8))


@pytest.mark.parametrize("where", [0, 1, 4095, 9_999])
def test_a_flipped_byte_is_seen_and_named(where: int) -> None:
    sent = random_bytes(10_000, 1)
    landed = sent.copy()
    assert verdict(landed, expect_prefix(sent, sent.size)) == ""
    landed[where] ^= 0x10
    assert verdict(landed, expect_prefix(sent, sent.size)).startswith(f"byte {where} is ")


def test_a_flipped_byte_behind_the_first_chunk_is_seen() -> None:
    sent = random_bytes(CHUNK_BYTES + 11, 1)
    landed = sent.copy()
    landed[-1] ^= 1
    assert first_difference(landed, sent) == CHUNK_BYTES + 10


def test_a_write_beyond_the_written_prefix_is_seen() -> None:
    sent = random_bytes(4096, 2)
    landed = np.full(4096, POISON, dtype=np.uint8)
    landed[:1000] = sent[:1000]
    assert verdict(landed, expect_prefix(sent, 1000)) == ""
    landed[1000] ^= 0xFF
    assert verdict(landed, expect_prefix(sent, 1000)).startswith("byte 1000 is ")


def test_a_missing_byte_is_seen() -> None:
    sent = random_bytes(4096, 2)
    landed = np.full(4096, POISON, dtype=np.uint8)
    landed[:999] = sent[:999]
    assert verdict(landed, expect_prefix(sent, 1000)).startswith("byte 999 is ")


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="10 bytes with 11"):
        first_difference(random_bytes(10, 1), random_bytes(11, 1))


def test_pages_are_distinct_and_inside() -> None:
    pages = page_list(64, 64, 5)
    assert sorted(pages.tolist()) == list(range(64))
    with pytest.raises(ValueError, match="65 distinct pages"):
        page_list(64, 65, 5)


def test_page_lists_are_replayed_in_order_and_a_swapped_page_is_seen() -> None:
    page_bytes, room = 128, 32
    sent = random_bytes(page_bytes * room, 3)
    lists = [(page_list(room, 20, seed), page_list(room, 20, seed + 1)) for seed in (10, 20)]
    landed = np.full(sent.size, POISON, dtype=np.uint8)
    for sources, targets in lists:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            landed[target * page_bytes :][:page_bytes] = sent[source * page_bytes :][:page_bytes]
    expected = expect_pages(sent, lists, page_bytes)
    assert verdict(landed, expected) == ""
    one, other = lists[-1][1][:2].tolist()
    rows = landed.reshape(-1, page_bytes)
    rows[[one, other]] = rows[[other, one]]
    assert verdict(landed, expected) != ""


def test_a_page_outside_all_lists_must_stay_poison() -> None:
    page_bytes, room = 128, 32
    sent = random_bytes(page_bytes * room, 3)
    lists = [(page_list(room, 4, 1), page_list(room, 4, 2))]
    landed = expect_pages(sent, lists, page_bytes)
    outside = next(page for page in range(room) if page not in lists[0][1])
    landed[outside * page_bytes] ^= 1
    assert verdict(landed, expect_pages(sent, lists, page_bytes)).startswith(f"byte {outside * page_bytes} is ")

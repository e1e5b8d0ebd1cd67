"""What was reported: many words at once equal one after the other, and no row counts twice or for somebody else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfabric import RemoteProtocolError
from asyncfabric.weights.memory.checksums import ChecksumKind
from asyncfabric.weights.messages import Written
from asyncfabric.weights.receiver.awaited import Columns, Reported

ROWS = np.array([3, 5, 8, 13, 21, 34])
SENDERS = np.array([0, 0, 1, 1, 2, 2])
NAMES = {"a": 0, "b": 1, "c": 2}


def reported() -> Reported:
    return Reported(ROWS, SENDERS, NAMES)


def word(*rows: int, kind: ChecksumKind = "xxh3") -> Written:
    sums = np.array([7 * abs(row) for row in rows], "<u8")
    return Written(1, np.array(rows, "<i8").tobytes(), sums.tobytes(), kind)


def test_many_words_are_one_lookup_for_each_kind_and_equal_them_one_by_one() -> None:
    found = reported()
    first = list(found.take([("c", word(34)), ("a", word(5, 3)), ("b", word(13, kind="words"))]))
    assert [(each.rows.tolist(), each.sums.tolist(), each.kind) for each in first] == [
        ([34, 5, 3], [238, 35, 21], "xxh3"),
        ([13], [91], "words"),
    ]
    assert [each.at.tolist() for each in first] == [[5, 1, 0], [3]]
    assert not found.all
    assert list(found.take([])) == []
    assert [each.rows.tolist() for each in found.take([("c", word(21)), ("b", word(8))])] == [[21, 8]] and found.all
    assert Reported(ROWS[:0], SENDERS[:0], {}).all


def columns(count: int) -> Columns:
    """Return rows, sums and places that notify each other."""
    rows = np.arange(count, dtype=np.int64)
    return Columns(rows * 10, rows.astype(np.uint64) + 7, rows, "xxh3")


def test_what_is_reported_is_cut_into_pieces_of_some_bytes() -> None:
    pieces = list(columns(6).cut(np.array([4, 4, 4, 30, 1, 1]), 8))
    assert [piece.at.tolist() for piece in pieces] == [[0, 1], [2], [3, 4, 5]]
    assert list(columns(0).cut(np.array([], np.int64), 8)) == []


@given(sizes=st.lists(st.integers(1, 50), max_size=30), most=st.integers(1, 120))
def test_pieces_are_all_rows_in_order(sizes: list[int], most: int) -> None:
    whole, row_bytes = columns(len(sizes)), np.array(sizes, np.int64)
    pieces = list(whole.cut(row_bytes, most))
    assert [at for piece in pieces for at in piece.at.tolist()] == whole.at.tolist()
    for piece in pieces:
        assert (piece.rows == piece.at * 10).all() and (piece.sums == piece.at + 7).all() and piece.kind == "xxh3"
        assert row_bytes[piece.at][1:].sum() < most, "all but its first row fit"


@pytest.mark.parametrize(
    "words",
    [
        [("b", word(8)), ("a", word(8))],
        [("b", word(8)), ("nobody", word(13))],
        [("b", word(9))],
        [("b", word(99))],
        [("b", word(-1))],
        [("b", word(8, 8))],
        [("b", word(8)), ("b", word(8))],
        [("a", word(3)), ("b", Written(1, word(8).rows, b""))],
        [("a", word(3)), ("b", Written(1, word(8).rows[:5], word(8).sums[:5]))],
    ],
)
def test_rows_that_are_not_the_senders_are_refused_by_name(words: list[tuple[str, Written]]) -> None:
    found = reported()
    with pytest.raises(RemoteProtocolError, match=f"{words[-1][0]} states that it wrote rows of version 1"):
        list(found.take(words))
    assert not found.all


def test_a_row_is_reported_once() -> None:
    found = reported()
    list(found.take([("b", word(8))]))
    for repeated in (word(8), word(13, 8)):
        with pytest.raises(RemoteProtocolError, match="b states"):
            list(found.take([("b", repeated)]))
        with pytest.raises(RemoteProtocolError, match="b states"):
            found.check("b", 1, np.frombuffer(repeated.rows, "<i8"))

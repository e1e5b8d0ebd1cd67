"""Messages in parts: whole in any order, and bounded where parts are missing."""

from __future__ import annotations

from asyncfabric.integrations.parts import UnfinishedMessages


def test_a_message_is_whole_with_its_last_part_in_whatever_order() -> None:
    unfinished = UnfinishedMessages(4, 100)
    assert unfinished.join(1, 7, 1, 2, b"b") is None
    assert unfinished.join(2, 7, 0, 2, b"x") is None, "another sender"
    assert unfinished.join(1, 7, 1, 2, b"again") is None
    assert unfinished.join(1, 7, 0, 2, b"a") == b"ab"
    assert (len(unfinished), unfinished.dropped) == (1, 0)


def test_a_message_that_is_whole_comes_through_however_many_are_not() -> None:
    unfinished = UnfinishedMessages(2, 100)
    for number in range(2):
        unfinished.join(1, number, 0, 2, b".")
    assert unfinished.join(1, 9, 0, 1, b"whole") == b"whole"
    assert (len(unfinished), unfinished.dropped) == (2, 0)


def test_of_too_many_and_of_too_much_the_oldest_is_dropped() -> None:
    unfinished = UnfinishedMessages(2, 100)
    for number in range(3):
        unfinished.join(1, number, 0, 2, b".")
    assert (len(unfinished), unfinished.dropped) == (2, 1)
    unfinished.join(1, 3, 0, 2, bytes(100))
    assert (len(unfinished), unfinished.dropped) == (1, 3)
    assert unfinished.join(1, 3, 1, 2, b"!") == bytes(100) + b"!"

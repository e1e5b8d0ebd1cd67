"""The comparison that decides the demo's exit status sees one changed token, one changed bit, one changed page."""

from __future__ import annotations

from asyncfabric_services.demo.pair.verdict import Continuation, compare

REFERENCE = Continuation((5, 6, 7, 8), ("a", "b", "c", "d"))


def test_equal_runs_are_identical() -> None:
    verdict = compare(Continuation((5, 6, 7, 8), ("a", "b", "c", "d")), REFERENCE, pages_equal=True)
    assert verdict.identical
    assert verdict.differences == ()


def test_one_changed_token_is_seen_and_named() -> None:
    for position in range(4):
        tokens = list(REFERENCE.tokens)
        tokens[position] += 1
        verdict = compare(Continuation(tuple(tokens), REFERENCE.digests), REFERENCE, pages_equal=True)
        expected = f"token {position} is {tokens[position]} instead of {REFERENCE.tokens[position]}"
        assert not verdict.identical
        assert verdict.differences == (expected,)


def test_a_missing_token_is_seen() -> None:
    verdict = compare(Continuation((5, 6, 7), ("a", "b", "c")), REFERENCE, pages_equal=True)
    assert verdict.differences == ("3 tokens instead of 4",)


def test_equal_tokens_from_other_logits_are_seen() -> None:
    verdict = compare(Continuation(REFERENCE.tokens, ("x", "b", "c", "d")), REFERENCE, pages_equal=True)
    assert verdict.differences == ("first logits differ",)
    verdict = compare(Continuation(REFERENCE.tokens, ("a", "b", "x", "d")), REFERENCE, pages_equal=True)
    assert verdict.differences == ("logits of token 2 differ",)


def test_equal_answers_from_other_pages_are_seen() -> None:
    assert not compare(REFERENCE, REFERENCE, pages_equal=False).identical

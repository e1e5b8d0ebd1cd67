"""Is the streamed answer the one-process answer? Pure comparison, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Continuation:
    """What greedy decoding gave: the tokens, and a digest of the logits that each was chosen from."""

    tokens: tuple[int, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PairVerdict:
    """Comparison of a streamed run with the one-process run; `differences` names in words what is wrong."""

    differences: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Return whether nothing at all differs."""
        return not self.differences


def compare(streamed: Continuation, reference: Continuation, *, pages_equal: bool) -> PairVerdict:
    """Compare tokens, the bits of all logits, and the content of the pages with the reference's cache."""
    found: list[str] = []
    if len(streamed.tokens) != len(reference.tokens):
        found.append(f"{len(streamed.tokens)} tokens instead of {len(reference.tokens)}")
    wrong = _first_difference(streamed.tokens, reference.tokens)
    if wrong is not None:
        found.append(f"token {wrong} is {streamed.tokens[wrong]} instead of {reference.tokens[wrong]}")
    wrong = _first_difference(streamed.digests, reference.digests)
    if wrong is not None:
        found.append("first logits differ" if wrong == 0 else f"logits of token {wrong} differ")
    if not pages_equal:
        found.append("pages differ from the cache of one process")
    return PairVerdict(tuple(found))


def _first_difference(ours: tuple[object, ...], theirs: tuple[object, ...]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)

"""What a check states: a verdict, what was found, and what to do about it. Plain values."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

PROVIDERS = ("local", "tcp", "verbs", "efa", "cuda")


class Verdict(StrEnum):
    """How it looks; by FAIL alone the command fails."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    ABSENT = "n.a."


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. Everything but OK has a fix: one sentence that states what to do, or why nothing need be done."""

    check: str
    verdict: Verdict
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        """Refuse a complaint without advice: it is our bug, not the machine's."""
        if self.verdict is not Verdict.OK and not self.fix:
            raise ValueError(f"{self.check}: {self.verdict} without a fix")


Asked = AbstractSet[str]
"""The providers that the user named; empty when none was. What is absent fails only for them."""


def absent(check: str, found: str, fix: str, asked: Asked, *needed_by: str) -> Finding:
    """Return the finding for something that is not there: n.a., or fail when a provider was asked for that needs it."""
    wanted = sorted(asked & set(needed_by))
    if wanted:
        return Finding(check, Verdict.FAIL, f"{found}, and {' and '.join(wanted)} needs it", fix)
    return Finding(check, Verdict.ABSENT, found, fix)


def missing(check: str, found: str, fix: str, asked: Asked, *needed_by: str) -> Finding:
    """Like `absent`, for something that works worse without: warn instead of n.a."""
    finding = absent(check, found, fix, asked, *needed_by)
    return finding if finding.verdict is Verdict.FAIL else Finding(check, Verdict.WARN, found, fix)

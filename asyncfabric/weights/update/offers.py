"""Offers: which version each trainer offers; an update can begin when all offer the same. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Offers:
    """The offers that stand."""

    def __init__(self, trainers: Iterable[str]) -> None:
        self._trainers = tuple(trainers)
        self._offered: dict[str, int] = {}

    def __contains__(self, trainer: str) -> bool:
        """Return whether an offer of this trainer stands."""
        return trainer in self._offered

    @property
    def agreed(self) -> int | None:
        """The version that all trainers offer, if they do."""
        if len(self._offered) < len(self._trainers):
            return None  # asked at every word while hundreds make theirs
        versions = {self._offered.get(name) for name in self._trainers}
        return versions.pop() if len(versions) == 1 else None

    def make(self, trainer: str, version: int) -> None:
        """Note an offer; it replaces an earlier one."""
        self._offered[trainer] = version

    def withdraw(self, trainer: str, version: int | None = None) -> None:
        """Forget what a trainer offers, or only if it is this version."""
        if version is None or self._offered.get(trainer) == version:
            self._offered.pop(trainer, None)

    def take_down(self, version: int) -> list[str]:
        """Forget all offers of a version; returns who had made them."""
        found = [trainer for trainer, offered in self._offered.items() if offered == version]
        for trainer in found:
            del self._offered[trainer]
        return found

"""Choosing the next token from logits. Pure; a request's choice depends on its own logits and seed alone."""

from __future__ import annotations

import random

import torch

from asyncfabric_services.runner.sampling import Sampling


class Chooser:
    """Chooses the tokens of one request, one after the other."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._draws = random.Random(sampling.seed)

    def skip(self, count: int) -> None:
        """Pass over the draws of `count` tokens that were chosen elsewhere, so that an answer goes on as it began."""
        if self._sampling.temperature != 0:
            for _ in range(count):
                self._draws.random()

    def choose(self, logits: torch.Tensor) -> int:
        """Return a token id for logits [vocabulary] on the CPU."""
        if self._sampling.temperature == 0:
            return int(logits.numpy().argmax())  # numpy promises the first of equal ones, torch does not
        likely, order = torch.sort(
            torch.softmax(logits.double() / self._sampling.temperature, dim=-1), descending=True, stable=True
        )
        sums = likely.cumsum(0)
        kept = int(torch.searchsorted(sums, self._sampling.top_p)) + 1
        sums = sums[: min(kept, len(sums))]
        drawn = int(torch.searchsorted(sums, self._draws.random() * float(sums[-1]), right=True))
        return int(order[min(drawn, len(sums) - 1)])

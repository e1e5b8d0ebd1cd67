"""Sources: where the rows of a step came from, worked out when somebody asks: most experts never do.

Runs on the event loop's thread. Knows neither memory nor peers.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from asyncfabric.moe.host.grouping import Groups
from asyncfabric.moe.host.routing import Experts, Ints


class Sources:
    """For each output row of a step the token that it is of; -1 for padding. Shape [rows], int64."""

    def __init__(self, origins: Experts, groups: Groups, max_tokens: int) -> None:
        """Keep the origins, rank * max_tokens + token of each arrived row; they must stay as they are."""
        self._origins = origins
        self._groups = groups
        self._max_tokens = max_tokens

    @cached_property
    def ranks(self) -> torch.Tensor:
        """The rank of each row."""
        return torch.from_numpy(self._parts[0])

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Which token of that rank each row is."""
        return torch.from_numpy(self._parts[1])

    @cached_property
    def choices(self) -> torch.Tensor:
        """Which of the token's choices each row is."""
        return torch.from_numpy(self._groups.choice_of)

    @cached_property
    def _parts(self) -> tuple[Ints, Ints]:
        row_of = self._groups.row_of
        ranks, tokens = np.divmod(np.append(self._origins.astype(np.int64), -1)[row_of], self._max_tokens)
        ranks[row_of < 0] = tokens[row_of < 0] = -1
        return ranks, tokens

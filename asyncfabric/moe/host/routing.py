"""Routing as pure functions: which token goes where.

Whole arrays, no loop over tokens; plans of traffic need nothing that is compiled, a step takes `record.find_route`.
Knows neither memory nor peers. A "member" is one place that tokens go to: a rank, or a node seen from outside;
`owner[e]` is the member that holds expert e, -1 for an expert that cannot be reached.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Experts = NDArray[np.int32]


class Route(NamedTuple):
    """Which tokens go to which member, one copy each, however many of their experts it holds.

    Attributes:
        tokens: the tokens for member 0, then those for member 1 ...; ascending for each.
        offsets: where the tokens of each member begin; one more entry ends the last.
    """

    tokens: Ints
    offsets: Ints

    @property
    def counts(self) -> Ints:
        """Rows for each member."""
        return np.diff(self.offsets)

    def of(self, member: int) -> Ints:
        """Return the tokens for one member."""
        return self.tokens[self.offsets[member] : self.offsets[member + 1]]


def owner_of_expert(ranges: list[range], num_experts: int) -> Ints:
    """Return for each expert the position of the range that holds it, -1 where none does."""
    owner = np.full(num_experts, -1, dtype=np.int64)
    for member, experts in enumerate(ranges):
        owner[experts.start : experts.stop] = member
    return owner


def owners(indices: Experts, owner: Ints) -> Ints:
    """Return for each (token, choice) the member that holds the expert, -1 for masked and unreachable ones."""
    # A masked choice is -1, which picks the last entry: the appended one.
    return np.append(owner, -1)[indices]


def plan_route(owned: Ints, members: int) -> Route:
    """Return the route of tokens whose choices belong to the members in `owned`, of shape [tokens, top_k]."""
    tokens, choices = owned.shape
    goes = np.zeros((tokens, members + 1), dtype=bool)
    goes[np.repeat(np.arange(tokens), choices), owned.reshape(-1)] = True  # -1 marks the last column, which is dropped
    member, token = np.nonzero(goes[:, :members].T)
    offsets = np.zeros(members + 1, dtype=np.int64)
    np.cumsum(np.bincount(member, minlength=members), out=offsets[1:])
    return Route(np.ascontiguousarray(token, dtype=np.int64), offsets)

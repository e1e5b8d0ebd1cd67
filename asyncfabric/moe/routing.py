"""Routing as pure functions: which token goes where, and how the rows that arrived are grouped by expert.

Whole arrays, no loop over tokens. Knows neither memory nor peers. A "member" is one place that tokens go to: a rank, or
a node seen from outside; `owner[e]` is the member that holds expert e, -1 for an expert that cannot be reached.
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


class Groups(NamedTuple):
    """Rows grouped by expert. A pair is one row together with one expert that it goes to.

    Attributes:
        counts: rows of each expert, without padding.
        offsets: where each expert's rows begin; the last entry is the number of rows with padding.
        row_of: for each output row the row it is a copy of, -1 for padding.
        choice_of: for each output row which of the row's top-k choices it serves, -1 for padding.
        pair_offsets: where the pairs of each row begin in `position`; one more entry ends the last.
        position: for each pair its output row; pairs in the order of rows, then of choices.
        pair_row: for each pair its row.
        pair_choice: for each pair which of its row's choices it is.
    """

    counts: Ints
    offsets: Ints
    row_of: Ints
    choice_of: Ints
    pair_offsets: Ints
    position: Ints
    pair_row: Ints
    pair_choice: Ints


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
    return Route(token.astype(np.int64, copy=False), offsets)


def padded(counts: Ints, alignment: int) -> Ints:
    """Return where groups of these sizes begin when each begins at a multiple of `alignment`; one more entry."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(-(-counts // alignment) * alignment, out=offsets[1:])
    return offsets


def group_rows(indices: Experts, experts: range, alignment: int) -> Groups:
    """Group rows by the experts of one rank; within an expert they keep their order.

    Args:
        indices: experts of each row, shape [rows, top_k]; those outside `experts` and -1 are none of this rank.
        experts: the experts of this rank.
        alignment: each expert's rows begin at a multiple of it.
    """
    local = indices.astype(np.int64) - experts.start
    here = (indices >= 0) & (local >= 0) & (local < len(experts))
    row, choice = np.nonzero(here)
    expert = local[row, choice]
    counts = np.bincount(expert, minlength=len(experts)).astype(np.int64)
    offsets = padded(counts, alignment)
    order = np.argsort(expert, kind="stable")
    begins = np.cumsum(counts) - counts
    position = np.empty(len(expert), dtype=np.int64)
    position[order] = np.arange(len(expert)) + (offsets[:-1] - begins)[expert[order]]
    row_of = np.full(offsets[-1], -1, dtype=np.int64)
    choice_of = np.full(offsets[-1], -1, dtype=np.int64)
    row_of[position], choice_of[position] = row, choice
    pair_offsets = np.zeros(len(indices) + 1, dtype=np.int64)
    np.cumsum(here.sum(axis=1), out=pair_offsets[1:])
    return Groups(counts, offsets, row_of, choice_of, pair_offsets, position, row, choice)

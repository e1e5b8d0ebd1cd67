"""Which bytes of which source page go where, for any two tensor parallelisms and page sizes: the pure planner.

Pure functions over numpy arrays; no fabric. What is planned here decides how many arrivals a target counts, so a target
computes its counts from the two layouts alone: pieces are merged inside a page, where they are adjacent by
the layouts, and never because page numbers happen to follow each other (the target does not know the source's pages).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncfabric.kv.layout import KvLayout

Ints = NDArray[np.int64]


class HeadPieces(NamedTuple):
    """Pieces of one length inside of pages: byte offsets in a source page and in a target page."""

    length_bytes: int
    source_offsets: Ints
    target_offsets: Ints


class Batch(NamedTuple):
    """What one write_pages call takes: pieces of one length, as byte offsets in layer 0 of both pools."""

    length_bytes: int
    source_offsets: Ints
    target_offsets: Ints


class _Kind(NamedTuple):
    """Token runs that lie alike in both pages: their numbers, ascending, and the pieces of each."""

    runs: Ints
    pieces: tuple[HeadPieces, ...]


class KvPlan:
    """The plan of one request between one source rank and one target rank.

    The tokens are cut into runs at each page end of either side. A run is pushed once, when its last token is there.

    Attributes:
        source, target: the two layouts.
        tokens: tokens of the request.
        runs: token runs of the request.
        rotation: shifts which of several ranks with the same head is the source, so that requests share the load.
        pieces: pieces of one layer, which is what the target counts for a layer in which this source serves.
    """

    def __init__(self, source: KvLayout, target: KvLayout, tokens: int, rotation: int = 0) -> None:
        """Plan; raises ValueError naming the field in which the layouts differ, or for a negative number of tokens."""
        difference = source.difference(target)
        if difference is not None:
            raise ValueError(f"pages cannot be moved between these layouts, they differ in {difference}")
        if tokens < 0:
            raise ValueError(f"tokens must be 0 or more, got {tokens}")
        self.source = source
        self.target = target
        self.tokens = tokens
        self.rotation = rotation
        self._starts, self._ends = token_runs(source.page_tokens, target.page_tokens, tokens)
        self.runs: int = len(self._starts)
        self._even_tokens = source.page_tokens if source.page_tokens == target.page_tokens else 0
        self._shares_heads = bool(_shared_heads(source, target))
        self._turns = source.replicas
        self._turn = (source.tp_rank - target.tp_rank - rotation) % self._turns
        self._kinds = _kinds(source, target, self._starts, self._ends)
        self.pieces: int = sum(
            len(kind.runs) * sum(len(pieces.source_offsets) for pieces in kind.pieces) for kind in self._kinds
        )

    def serves(self, layer: int) -> bool:
        """Return whether this source writes this target's pages of a layer; as the function `serves`."""
        return self._shares_heads and layer % self._turns == self._turn

    def runs_ready(self, tokens_ready: int) -> int:
        """Return how many runs are complete once the first `tokens_ready` tokens are in place."""
        if not 0 <= tokens_ready <= self.tokens:
            raise ValueError(f"tokens_ready must be in 0..{self.tokens}, got {tokens_ready}")
        if tokens_ready == self.tokens:
            return self.runs
        if self._even_tokens:
            return tokens_ready // self._even_tokens
        return int(np.searchsorted(self._ends, tokens_ready, side="right"))

    def place(self, source_pages: Ints, target_pages: Ints) -> PlacedPlan:
        """Return the plan with the block tables of both sides filled in; raises ValueError for tables too short."""
        for name, table, layout in (("source", source_pages, self.source), ("target", target_pages, self.target)):
            if len(table) < layout.pages_for(self.tokens):
                need = layout.pages_for(self.tokens)
                raise ValueError(f"the {name} block table has {len(table)} pages, {self.tokens} tokens need {need}")
        return PlacedPlan(self, np.asarray(source_pages, np.int64), np.asarray(target_pages, np.int64))


class PlacedPlan:
    """A plan with block tables: byte offsets for every piece of layer 0, computed once and sliced for each chunk."""

    def __init__(self, plan: KvPlan, source_pages: Ints, target_pages: Ints) -> None:
        """Not for users: see KvPlan.place."""
        self.plan = plan
        self._rows: list[tuple[Ints, int, Batch]] = []
        self._sliced: tuple[int, int, tuple[Batch, ...]] = (0, 0, ())
        for kind in plan._kinds:
            first = plan._starts[kind.runs]
            source_base = source_pages[first // plan.source.page_tokens] * plan.source.page_bytes
            target_base = target_pages[first // plan.target.page_tokens] * plan.target.page_bytes
            for pieces in kind.pieces:
                sources = (source_base[:, None] + pieces.source_offsets).reshape(-1)
                targets = (target_base[:, None] + pieces.target_offsets).reshape(-1)
                each = len(pieces.source_offsets)
                self._rows.append((kind.runs, each, Batch(pieces.length_bytes, sources, targets)))

    def batches(self, first_run: int, end_run: int) -> tuple[Batch, ...]:
        """Return what to write for runs first_run .. end_run - 1 of one layer; offsets are those of layer 0.

        The slices are kept until other runs are asked for: the layers of a chunk have them in common.
        """
        first, end, slices = self._sliced
        if (first, end) != (first_run, end_run):
            slices = tuple(self._slices(first_run, end_run))
            self._sliced = first_run, end_run, slices
        return slices

    def _slices(self, first_run: int, end_run: int) -> Iterator[Batch]:
        for runs, each, batch in self._rows:
            if len(runs) == self.plan.runs:  # all runs are of this kind, as with pages of one size: no search
                first, end = first_run, end_run
            else:
                first, end = runs.searchsorted((first_run, end_run)).tolist()
            if first < end:
                part = slice(first * each, end * each)
                yield Batch(batch.length_bytes, batch.source_offsets[part], batch.target_offsets[part])


def serves(source: KvLayout, target: KvLayout, layer: int, rotation: int = 0) -> bool:
    """Return whether a source rank writes the pages of a target rank in one layer.

    A head that several source ranks keep is written by one of them: they take turns by layer, target rank and rotation.
    """
    if not _shared_heads(source, target):
        return False
    replicas = source.replicas
    return source.tp_rank % replicas == (layer + target.tp_rank + rotation) % replicas


def context_rank(source: KvLayout, rotation: int = 0) -> int:
    """Return the source rank that writes the context: each rank has it, one sends it."""
    return rotation % source.tp_size


def writes_anything(source: KvLayout, target: KvLayout, rotation: int = 0) -> bool:
    """Return whether a source rank has pages or the context to write to a target rank; others get no offer."""
    if target.context_bytes and context_rank(source, rotation) == source.tp_rank:
        return True
    return any(serves(source, target, layer, rotation) for layer in range(source.layers))


def expected_arrivals(source: KvLayout, target: KvLayout, tokens: int, rotation: int = 0) -> Ints:
    """Return what the target counts in each layer, from all source ranks together; the context is one more.

    Both layouts suffice: neither page numbers nor chunk sizes of the source matter.

    Args:
        source: the layout of any rank of the source.
        target: the layout of the target's rank.
        tokens: tokens of the request.
        rotation: as in the offer.
    """
    counts = np.zeros(target.layers, np.int64)
    layers = np.arange(target.layers)
    for rank in range(source.tp_size):
        each = source.at_rank(rank)
        if _shared_heads(each, target):
            mine = (layers + target.tp_rank + rotation) % each.replicas == rank % each.replicas
            counts[mine] += KvPlan(each, target, tokens, rotation).pieces
    return counts


def token_runs(source_page_tokens: int, target_page_tokens: int, tokens: int) -> tuple[Ints, Ints]:
    """Return (starts, ends) of the runs of tokens that lie in one page on both sides; the last may pass `tokens`.

    It passes them to the next page end of either side: what lies there is in pages that both sides own, and whole runs
    keep the lengths of pieces few.
    """
    if tokens == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ours = np.arange(0, tokens + source_page_tokens, source_page_tokens, dtype=np.int64)
    if source_page_tokens == target_page_tokens:
        return ours[:-1][ours[:-1] < tokens], ours[1:][ours[:-1] < tokens]
    theirs = np.arange(0, tokens + target_page_tokens, target_page_tokens, dtype=np.int64)
    cuts = np.union1d(ours, theirs)
    inside = cuts[:-1] < tokens
    return cuts[:-1][inside], cuts[1:][inside]


def _shared_heads(source: KvLayout, target: KvLayout) -> range:
    """Return the heads that both ranks keep."""
    return range(max(source.first_head, target.first_head), min(source.heads.stop, target.heads.stop))


def _kinds(source: KvLayout, target: KvLayout, starts: Ints, ends: Ints) -> list[_Kind]:
    if not len(starts) or not _shared_heads(source, target):
        return []
    if source.page_tokens == target.page_tokens:
        return [_Kind(np.arange(len(starts)), _pieces(source, target, 0, 0, source.page_tokens))]
    places = np.stack([starts % source.page_tokens, starts % target.page_tokens, ends - starts], axis=1)
    kinds, which = np.unique(places, axis=0, return_inverse=True)
    which = which.reshape(-1)  # numpy 2.0 gave it a second axis
    return [
        _Kind(np.flatnonzero(which == number), _pieces(source, target, *map(int, kind)))
        for number, kind in enumerate(kinds)
    ]


@lru_cache(maxsize=4096)
def _pieces(
    source: KvLayout, target: KvLayout, source_token: int, target_token: int, length: int
) -> tuple[HeadPieces, ...]:
    """Return the pieces of a run that begins at these tokens of its pages, adjacent ones merged, by length."""
    heads = _shared_heads(source, target)
    first, last = heads.start, heads.stop
    element = source.head_dim * source.itemsize
    planes = np.arange(source.planes)[:, None]

    def offsets(layout: KvLayout, token: int) -> Any:
        if layout.order == "NHD":
            tokens = np.arange(token, token + length)[None, :]
            return ((planes * layout.page_tokens + tokens) * layout.local_heads + first - layout.first_head) * element
        mine = np.arange(first, last)[None, :] - layout.first_head
        return ((planes * layout.local_heads + mine) * layout.page_tokens + token) * element

    size = element * (last - first if source.order == "NHD" else length)
    sources, targets = offsets(source, source_token).reshape(-1), offsets(target, target_token).reshape(-1)
    breaks = (np.diff(sources) != size) | (np.diff(targets) != size)
    begins = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    sizes = np.diff(np.concatenate((begins, [len(sources)]))) * size
    return tuple(
        HeadPieces(int(each), sources[begins][sizes == each], targets[begins][sizes == each])
        for each in np.unique(sizes)
    )

"""What a step of an exchange among GPUs moved, read from what its kernels left, and what it must be by the routes.

Pure functions over tensors, any thread. Behind a proxy the engine counts writes and bytes itself; `carried` is what it
must count.
"""

from __future__ import annotations

import torch

from asyncfabric.moe import MoeConfig
from asyncfabric.moe.gpu import CudaMoeHandle
from asyncfabric.moe.gpu.lanes import lanes_of
from asyncfabric.moe.gpu.layout import NvlinkLayout

WORD_BYTES = 4


def rows_by_rank(config: MoeConfig, rank: int, indices: torch.Tensor) -> list[int]:
    """Return how many of these tokens have experts of each rank: the rows that go there.

    By the nodes: of each node, and its rows go to the rank that has there the place that this one has here.

    Args:
        config: the shape.
        rank: of this process.
        indices: experts of each token, shape [tokens, top_k].
    """
    size = config.node_size
    owner = torch.tensor([each // size for each in range(config.ranks) for _ in config.experts_of(each)])
    owned = owner[indices.long().cpu()]
    found = [0] * config.ranks
    for node in range(config.nodes):
        found[node * size + rank % size] = int((owned == node).any(dim=1).sum())
    return found


def moved(config: MoeConfig, rank: int, handle: CudaMoeHandle) -> dict[str, int]:
    """Return what kernels stored to the memory of other ranks of the host in one step, by what they noted of it.

    Rows and sums are counted from the ranks that the sender noted for each token, and from the choices for which the
    receiver has a row; words are stored with release, one for each row or part of a sum, record and end of a step.

    Args:
        config: the shape.
        rank: of this process.
        handle: of a step that was combined.

    Returns:
        `rows`, `sums`, `words`, and the bytes of all of these: `dispatch_bytes` with routes, `combine_bytes`.
    """
    layout, others = NvlinkLayout(config), config.ranks - 1
    reached = handle.output.reached[: handle.tokens].cpu()
    rows = sum(int((reached >> other & 1).sum()) for other in range(config.ranks) if other != rank)
    places, counts = handle.output.pairs[..., 0].cpu(), handle.output.counts.tolist()
    sums = sum(
        int((places[other, : counts[other]] != -1).any(dim=1).sum()) for other in range(config.ranks) if other != rank
    )
    there = rows + layout.routers * others
    back = sums * layout.parts + others
    sizes = layout.sizes
    records = sum(layout.routers * len(config.experts_of(other)) * WORD_BYTES for other in range(config.ranks))
    records -= layout.routers * len(config.experts_of(rank)) * WORD_BYTES
    routes = others * (sizes.head // 2 + handle.tokens * config.top_k * 2 * WORD_BYTES)
    return {
        "rows": rows,
        "sums": sums,
        "words": there + back,
        "dispatch_bytes": rows * (layout.row_bytes + config.scales * WORD_BYTES)
        + records
        + routes
        + there * WORD_BYTES,
        "combine_bytes": sums * layout.back_row_bytes + back * WORD_BYTES,
    }


def carried(config: MoeConfig, sent: int, taken: int) -> tuple[int, int]:
    """Return (writes, bytes) of a rank for one rank of another host in one step.

    Args:
        config: the shape.
        sent: rows for that rank.
        taken: rows that came from it, whose sums go back.
    """
    layout = NvlinkLayout(config) if config.node_size == 1 else lanes_of(config).across
    spans = [layout.first_span(1), layout.rest_span(1, sent), layout.back_span(1, taken)]
    writes = 2 + (sent > layout.config.private)
    return writes, sum(end - begin for begin, end in spans)

"""What one writes on torch.distributed with gloo's all_to_all, for `bench moe` to be compared with.

Blocks; every rank calls it at the same time. `GlooRows` moves rows and does nothing else; `gloo_exchange` does the
whole job of an exchange, with a row for each choice, since all_to_all knows no fan-out.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from asyncfabric.moe import MoeConfig
from asyncfabric_services.bench.moe.workload import TokenLoad


class GlooRows:
    """Rows there and back with all_to_all, from buffers that are ready: no packing, no grouping, no sums."""

    def __init__(self, config: MoeConfig, send: list[int], receive: list[int]) -> None:
        """Send `send[rank]` rows to each rank and get `receive[rank]` of each."""
        there = config.hidden * config.in_torch.itemsize
        back = config.hidden * config.out_torch.itemsize
        self._send, self._receive = send, receive
        self._out_there, self._in_there = _rows(sum(send), there), _rows(sum(receive), there)
        self._out_back, self._in_back = _rows(sum(receive), back), _rows(sum(send), back)
        self.payload_bytes: int = sum(send) * there + sum(receive) * back

    def move(self) -> None:
        """Move the rows there and back once."""
        dist.all_to_all_single(self._in_there, self._out_there, self._receive, self._send)
        dist.all_to_all_single(self._in_back, self._out_back, self._send, self._receive)


def _rows(count: int, width: int) -> torch.Tensor:
    return torch.zeros((count, width), dtype=torch.uint8)


def gloo_exchange(config: MoeConfig, rank: int, tokens: TokenLoad) -> torch.Tensor:
    """Dispatch tokens, let the experts give their rows back as they are, and combine; no choice may be masked."""
    experts = torch.arange(config.num_experts)
    flat = tokens.indices.reshape(-1)
    order = flat.argsort(stable=True)
    rows = tokens.x.index_select(0, order // config.top_k)
    counts = torch.bincount(flat, minlength=config.num_experts)
    held = [len(config.experts_of(each)) for each in range(config.ranks)]
    send = [int(part.sum()) for part in torch.split(counts, held)]
    came_counts = torch.empty(config.ranks * held[rank], dtype=counts.dtype)
    dist.all_to_all_single(came_counts, counts, [held[rank]] * config.ranks, held)
    by_source = came_counts.view(config.ranks, held[rank])
    receive = by_source.sum(1).tolist()
    came = torch.empty(sum(receive), config.hidden, dtype=rows.dtype)
    dist.all_to_all_single(came, rows, receive, send)
    grouping = experts[: held[rank]].repeat(config.ranks).repeat_interleave(came_counts).argsort(stable=True)
    grouped = came.index_select(0, grouping)
    returned = torch.empty_like(came).index_copy_(0, grouping, grouped)
    back = torch.empty_like(rows)
    dist.all_to_all_single(back, returned, send, receive)
    choices = torch.empty_like(back).index_copy_(0, order, back).view(-1, config.top_k, config.hidden)
    sums = torch.zeros(len(tokens.x), config.hidden)
    for choice in range(config.top_k):
        sums += choices[:, choice].float() * tokens.weights[:, choice, None]
    return sums.to(config.out_torch)

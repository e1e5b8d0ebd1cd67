"""What combine returns, computed in one process without any exchange: the definition of the result.

Pure functions, any thread. Written for the eye: dense tensors, no layout, nothing shared with the exchange.
"""

from __future__ import annotations

import torch

from asyncfabric.moe.config import MoeConfig


def reference_combine(
    config: MoeConfig, rank: int, outputs: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return what a rank gets for its tokens, bit for bit.

    The outputs of the experts of one rank are weighted and added up in fp32 in the order of choices, and rounded to
    config.out_dtype. These sums are added up in fp32, beginning with the own rank and going round the circle of ranks.
    With nodes the circle of a node's ranks is added up and rounded first, then the circle of nodes; both begin with the
    place and the node of the own rank.

    Args:
        config: the shape.
        rank: whose tokens these are.
        outputs: what the expert of each choice made of each token, shape [tokens, top_k, hidden] of config.out_dtype;
            anything for masked choices.
        indices: experts, shape [tokens, top_k]; -1 for masked ones, also for experts of excluded ranks.
        weights: shape [tokens, top_k], float32.
    """
    owner = torch.full((config.num_experts + 1,), -1, dtype=torch.int64)
    for each in range(config.ranks):
        experts = config.experts_of(each)
        owner[experts.start : experts.stop] = each
    owners = owner[indices.long()]  # -1 picks the last entry

    def of_rank(wanted: int) -> torch.Tensor:
        sums = torch.zeros(outputs.shape[0], outputs.shape[2], dtype=torch.float32)
        for choice in range(config.top_k):
            weighted = outputs[:, choice].float() * weights[:, choice, None]
            sums = torch.where((owners[:, choice] == wanted)[:, None], sums + weighted, sums)
        return sums.to(config.out_torch)

    size = config.node_size
    node, place = divmod(rank, size)
    total = torch.zeros(outputs.shape[0], outputs.shape[2], dtype=torch.float32)
    for far in range(config.nodes):
        first = (node + far) % config.nodes * size
        if size == 1:
            total += of_rank(first).float()
            continue
        sums = torch.zeros_like(total)
        for near in range(size):
            sums += of_rank(first + (place + near) % size).float()
        total += sums.to(config.out_torch).float()
    return total.to(config.out_torch)

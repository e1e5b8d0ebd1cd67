"""What travels with rows among GPUs, as words of 32 bits: scales, weights and experts. Pure functions on a stream.

Nothing here asks the GPU anything.
"""

from __future__ import annotations

import torch


def words_of(
    width: int,
    scales: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    like: torch.Tensor,
) -> torch.Tensor:
    """Return [scales | weights | bits of experts] of each token, float32 [tokens, width]; `like` has the tokens."""
    words = torch.zeros(len(like), width, dtype=torch.float32, device=like.device)
    at = 0
    if scales is not None:
        at = scales.shape[1]
        words[:, :at] = scales
    if topk_weights is not None and topk_idx is not None:
        top_k = topk_idx.shape[1]
        words[:, at : at + top_k] = topk_weights
        words.view(torch.int32)[:, at + top_k : at + 2 * top_k] = topk_idx.int()
    return words


def choices_in(
    words: torch.Tensor, at: int, top_k: int, experts: range, filled: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the own experts and weights of rows, from their words; -1 and 0 for others, and for rows from `filled` on.

    Args:
        words: as `words_of` makes them, of the rows.
        at: where weights begin.
        top_k: choices of a token.
        experts: of this rank.
        filled: how many rows there are, one int32 on the GPU; None: all of them.
    """
    chosen = words.view(torch.int32)[:, at + top_k : at + 2 * top_k].long()
    own = (chosen >= experts.start) & (chosen < experts.stop)
    if filled is not None:
        own &= (torch.arange(len(words), dtype=torch.int32, device=words.device) < filled)[:, None]
    return torch.where(own, chosen - experts.start, -1), torch.where(own, words[:, at : at + top_k], 0.0)


def packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scales that are powers of two as their exponents, four in an int32 (UE8M0), the last dimension a quarter.

    Args:
        scales: shape [experts, rows, scales] with rows beside each other in memory; a multiple of 4 scales.
    """
    exponents = (scales.transpose(1, 2).view(torch.int32) >> 23).to(torch.uint8)
    experts, count, rows = exponents.shape
    four = exponents.view(experts, count // 4, 4, rows).transpose(2, 3).contiguous()
    return four.view(torch.int32).squeeze(-1).transpose(1, 2)

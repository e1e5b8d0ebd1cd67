"""Tokens as fp8-e4m3 with one fp32 scale for each block of elements, and back: what a config with `scale_block` moves.

Pure functions over tensors, any thread.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
"""The largest finite number of e4m3."""
LEAST_PEAK = 1e-4
"""Blocks whose largest element is smaller are scaled as if it were this: a block of zeros has a scale too."""


def to_fp8(x: torch.Tensor, block: int, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (elements in float8_e4m3fn, scales in float32): an element times the scale of its block is what it was.

    Args:
        x: shape [..., hidden].
        block: elements that share a scale; divides hidden.
        power_of_two: round scales up to powers of two, so that scaling rounds nothing.

    Raises:
        ValueError: `block` does not divide hidden.
    """
    hidden = x.shape[-1]
    if block < 1 or hidden % block:
        raise ValueError(f"block must divide hidden {hidden}, got {block}")
    blocks = x.float().view(*x.shape[:-1], hidden // block, block)
    scales = blocks.abs().amax(dim=-1).clamp(min=LEAST_PEAK) / LARGEST
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scaled = (blocks / scales[..., None]).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(x.shape), scales


def from_fp8(x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements that `to_fp8` was given, as near as fp8 has them.

    Args:
        x: shape [..., hidden], float8_e4m3fn.
        scales: shape [..., blocks], float32; `blocks` divides hidden.
        dtype: of the result.
    """
    blocks = scales.shape[-1]
    wide = x.float().view(*x.shape[:-1], blocks, x.shape[-1] // blocks) * scales[..., None]
    return wide.view(x.shape).to(dtype)

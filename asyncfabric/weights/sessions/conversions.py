r"""Conversions: what an engine's rank makes of a parameter that arrived, as it comes into its tensors. With torch.

A rule names one, as `Rule(source=r".*_proj\.weight", convert="fp8-channel")`; it sees what the rank has of the tensor,
fused and cut as the rule states, as vLLM's quantisation of a loaded model does. Any thread, on torch's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

E4M3_MAX = float(torch.finfo(torch.float8_e4m3fn).max)
LEAST_SCALE = 1.0 / (E4M3_MAX * 512.0)
"""Smaller scales are not used, as in vLLM: zeros have this one."""

MX_BLOCK = 32
"""Elements of the last dimension that share a scale in MX formats."""

E8M0_BIAS = 127


class Conversion(NamedTuple):
    """A function over what arrives, and the engine's tensors that its results go into.

    Attributes:
        function: takes a tensor, returns one tensor for each suffix; always of the same shapes for the same shape.
        suffixes: of the names that the results go into, behind the name of the tensor that the rule states; "" is that
            tensor itself, which is needed for its shape in any case and may be without memory (`device="meta"`).
    """

    function: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    suffixes: tuple[str, ...] = ("",)


def fp8_per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to float8_e4m3fn with a scale for each row.

    Args:
        weight: (..., rows, columns), of a floating type.

    Returns:
        The same shape in float8_e4m3fn, and what it is multiplied with to get the weight back: (..., rows, 1), float32.

    Source: vLLM's `QuantFP8`, dynamic, per token.
    """
    return _fp8(weight, weight.abs().amax(-1, keepdim=True))


def fp8_per_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to float8_e4m3fn with one scale, for each expert of a stack.

    Args:
        weight: (..., rows, columns), of a floating type.

    Returns:
        The same shape in float8_e4m3fn, and the scale: (1,), or (...) of a stack, float32.

    Source: vLLM's `QuantFP8`, dynamic, per tensor.
    """
    quantised, scales = _fp8(weight, weight.abs().amax((-2, -1), keepdim=True))
    return quantised, scales.view(scales.shape[:-2] or (1,))


def mxfp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to MXFP8: float8_e4m3fn with a power of two for each 32 elements of the last dimension, rounded up.

    Args:
        weight: (..., columns), of a floating type; columns a multiple of 32.

    Returns:
        The same shape in float8_e4m3fn, and the exponents as float8_e8m0fnu has them: (..., columns / 32), uint8.

    Raises:
        ValueError: the columns are no multiple of 32.

    Source: OCP MX v1.0; torch's `to_mxfp` for the rounding.
    """
    if weight.shape[-1] % MX_BLOCK:
        raise ValueError(f"MXFP8 needs columns that are a multiple of {MX_BLOCK}, the shape is {tuple(weight.shape)}")
    blocks = weight.float().reshape(*weight.shape[:-1], -1, MX_BLOCK)
    ratio = blocks.abs().amax(-1) / E4M3_MAX
    exponents = torch.ceil(torch.log2(ratio)).clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
    exponents = torch.where(ratio.isnan(), 255.0, exponents).to(torch.uint8)
    factors = torch.where(exponents == 0, 1.0, torch.exp2(E8M0_BIAS - exponents.float()))
    scaled = (blocks * factors.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.flatten(-2).to(torch.float8_e4m3fn), exponents


def _fp8(weight: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (largest.float() / E4M3_MAX).clamp(min=LEAST_SCALE)
    scaled = (weight.float() * scales.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scales


CONVERSIONS: Mapping[str, Conversion] = {
    "fp8-channel": Conversion(fp8_per_channel, ("", "_scale")),
    "fp8-tensor": Conversion(fp8_per_tensor, ("", "_scale")),
    "mxfp8": Conversion(mxfp8, ("", "_scale")),
}
"""Those that every receiver knows, by name."""

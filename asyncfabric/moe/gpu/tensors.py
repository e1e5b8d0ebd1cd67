"""What a caller gives to an exchange among GPUs: checked by what the host knows, without asking the GPU.

Pure functions, any thread.
"""

from __future__ import annotations

import torch

from asyncfabric.moe.config import INDEX_DTYPES, MoeConfig

ALIGNMENT = 16


def checked_tokens(
    config: MoeConfig,
    device: torch.device,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    casts: bool = False,
) -> None:
    """Raise for what does not fit; `casts`: tokens are of bfloat16 and have no scales, the kernel makes them fp8.

    Raises:
        TypeError: not tensors, or of another dtype.
        ValueError: of another shape, on another device, not contiguous or aligned, or too many.
    """
    _check("x", x, device, (torch.bfloat16 if casts else config.in_torch,), config.hidden)
    count = x.shape[0]
    if count > config.max_tokens:
        raise ValueError(f"x has {count} tokens, config.max_tokens is {config.max_tokens}")
    _check("indices", indices, device, INDEX_DTYPES, config.top_k, count)
    _check("weights", weights, device, (torch.float32,), config.top_k, count)
    if casts:
        if scales is not None:
            raise TypeError("scales were given with tokens that the kernel casts")
    elif config.scales:
        if scales is None:
            raise TypeError(f"scales are missing: config.scale_block is {config.scale_block}")
        _check("scales", scales, device, (torch.float32,), config.scales, count)
    elif scales is not None:
        raise TypeError("scales were given, but config.scale_block is 0")


def checked_mask(config: MoeConfig, device: torch.device, in_rank: torch.Tensor) -> None:
    """Raise for routes that are not one bool for each token and rank; the tokens are counted by `checked_tokens`.

    Raises:
        TypeError: not a tensor, or of another dtype, such as numbers of ranks.
        ValueError: of another shape, or on another device.
    """
    _check_kind("indices", in_rank, device, (torch.bool,))
    if in_rank.dim() != 2 or in_rank.shape[1] != config.ranks:
        raise ValueError(f"indices must have the shape [tokens, {config.ranks}], got {list(in_rank.shape)}")


def checked_count(device: torch.device, count: torch.Tensor | None) -> None:
    """Raise for a count that is not one int32 on the device."""
    if count is None:
        return
    if not isinstance(count, torch.Tensor):
        raise TypeError(f"count must be a torch tensor, got {type(count).__name__}")
    if count.dtype != torch.int32:
        raise TypeError(f"count must be of torch.int32, got {count.dtype}")
    if count.numel() != 1 or count.device != device:
        raise ValueError(f"count must be one number on {device}, got {list(count.shape)} on {count.device}")


def checked_rows(name: str, config: MoeConfig, device: torch.device, given: torch.Tensor, rows: int) -> None:
    """Raise for rows of config.out_dtype that do not fit; as `checked_tokens`."""
    _check(name, given, device, (config.out_torch,), config.hidden, rows)


def checked_weights(config: MoeConfig, device: torch.device, weights: torch.Tensor, tokens: int) -> None:
    """Raise for weights that are not one float32 for each choice; as `checked_tokens`."""
    _check("weights", weights, device, (torch.float32,), config.top_k, tokens)


def _check(
    name: str,
    given: torch.Tensor,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    width: int,
    rows: int | None = None,
) -> None:
    _check_kind(name, given, device, dtypes)
    if given.dim() != 2 or given.shape[1] != width or (rows is not None and given.shape[0] != rows):
        shape = f"[{'tokens' if rows is None else rows}, {width}]"
        raise ValueError(f"{name} must have the shape {shape}, got {list(given.shape)}")
    if not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    if given.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} must begin at a multiple of {ALIGNMENT} bytes")


def _check_kind(name: str, given: torch.Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(given).__name__}")
    if given.dtype not in dtypes:
        raise TypeError(f"{name} must be of {' or '.join(map(str, dtypes))}, got {given.dtype}")
    if given.device != device:
        raise ValueError(f"{name} must be on {device}, got {given.device}")

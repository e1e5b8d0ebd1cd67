"""What a caller gives to dispatch and combine: checked, and seen as bytes and arrays.

Pure functions, any thread. Misuse raises here, before anything was sent.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from asyncfabric._kernels.rows import RowMemory
from asyncfabric.moe.config import INDEX_DTYPES, MoeConfig
from asyncfabric.moe.host.loops import KINDS, record_loops, rows_of
from asyncfabric.moe.host.record import Bytes, Rows
from asyncfabric.moe.host.routing import Experts


def checked_tokens(
    config: MoeConfig,
    rank: int,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor | None,
) -> tuple[RowMemory, Rows]:
    """Return (the tokens as rows, what they are about).

    Raises:
        TypeError: not tensors, or of another dtype.
        ValueError: of another shape, not on the CPU, not contiguous, too many, or experts that do not exist.
    """
    _check("x", x, (config.in_torch,), config.hidden)
    count = x.shape[0]
    if count > config.max_tokens:
        raise ValueError(f"x has {count} tokens, config.max_tokens is {config.max_tokens}")
    _check("indices", indices, INDEX_DTYPES, config.top_k, count)
    _check("weights", weights, (torch.float32,), config.top_k, count)
    experts = indices.numpy()
    low, high = record_loops().range_of(experts)
    if not -1 <= low <= high < config.num_experts:
        raise ValueError(f"indices must be in -1..{config.num_experts - 1}, -1 for none; got {low}..{high}")
    if config.scales:
        if scales is None:
            raise TypeError(f"scales are missing: config.scale_block is {config.scale_block}")
        _check("scales", scales, (torch.float32,), config.scales, count)
        given = scales.numpy()
    else:
        if scales is not None:
            raise TypeError("scales were given, but config.scale_block is 0")
        given = np.empty((count, 0), dtype=np.float32)
    origins = _origins(rank, config.max_tokens)[:count]
    factors = (weights.detach() if weights.requires_grad else weights).numpy()
    return rows_of(x), Rows(origins, experts.astype(np.int32, copy=False), factors, given)


def tokens_in(config: MoeConfig, rows: Bytes) -> torch.Tensor:
    """Return bytes of tokens as a tensor, without a copy."""
    if not len(rows):
        return torch.empty((0, config.hidden), dtype=config.in_torch)
    return torch.from_numpy(rows).view(config.in_torch)


def checked_outputs(config: MoeConfig, outputs: torch.Tensor, rows: int) -> tuple[RowMemory, int]:
    """Return the outputs of the experts as rows, and the kind of their elements; raises as `checked_tokens`."""
    _check("expert_rows", outputs, (config.out_torch,), config.hidden, rows)
    return rows_of(outputs), KINDS[outputs.dtype]


@lru_cache
def _origins(rank: int, max_tokens: int) -> Experts:
    """Return where tokens of a rank come from."""
    origins = np.arange(rank * max_tokens, (rank + 1) * max_tokens, dtype=np.int32)
    origins.setflags(write=False)
    return origins


def _fits(given: object, dtypes: tuple[torch.dtype, ...], width: int, rows: int | None) -> bool:
    if not isinstance(given, torch.Tensor) or given.dtype not in dtypes or not given.is_cpu:
        return False
    shape = given.shape
    return len(shape) == 2 and shape[1] == width and rows in (None, shape[0]) and given.is_contiguous()


def _check(
    name: str, given: torch.Tensor, dtypes: tuple[torch.dtype, ...], width: int, rows: int | None = None
) -> None:
    if _fits(given, dtypes, width, rows):
        return
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(given).__name__}")
    if given.dtype not in dtypes:
        raise TypeError(f"{name} must be of {' or '.join(map(str, dtypes))}, got {given.dtype}")
    if given.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {given.device}; the host path moves host memory")
    if given.dim() != 2 or given.shape[1] != width or (rows is not None and given.shape[0] != rows):
        shape = f"[{'tokens' if rows is None else rows}, {width}]"
        raise ValueError(f"{name} must have the shape {shape}, got {list(given.shape)}")
    if not given.is_contiguous():
        raise ValueError(f"{name} must be contiguous")

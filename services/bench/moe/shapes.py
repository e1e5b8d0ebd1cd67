"""Shapes of `bench moe`: what the options leave open is the host's, or that of large models on GPUs.

Pure, but for asking torch how many GPUs there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncfabric.moe import MoeConfig

HOST: dict[str, Any] = {"ranks": 4, "hidden": 2048, "num_experts": 32}
GPUS: dict[str, Any] = {"hidden": 7168, "num_experts": 256, "buffer_limit_bytes": 1 << 36}
DTYPES: dict[str, dict[str, Any]] = {
    "fp8": {"in_dtype": "float8_e4m3fn", "scale_block": 128},
    "bf16": {"in_dtype": "bfloat16"},
}
MANY_TOKENS = 512


def shapes_of(
    token_counts: Iterable[int],
    dtypes: Iterable[str],
    ranks: int | None,
    hidden: int | None,
    top_k: int,
    experts: int | None,
    private: int | None,
    node_size: int | None = None,
    *,
    on_gpu: bool,
) -> list[dict[str, Any]]:
    """Return arguments of MoeConfig for each number of tokens and dtype; None stands for a default.

    Many tokens on GPUs are one step in flight, as in prefill.

    Raises:
        ValueError: no exchange has such a shape, or a token more distinct experts than there are.
    """
    if on_gpu and ranks is None:
        import torch

        ranks = max(1, torch.cuda.device_count())
    given = {"ranks": ranks, "hidden": hidden, "num_experts": experts}
    base = (GPUS if on_gpu else HOST) | {name: value for name, value in given.items() if value is not None}
    base |= {"top_k": top_k, "private_tokens": private, "out_dtype": "bfloat16", "node_size": node_size or 1}
    if top_k > base["num_experts"]:
        raise ValueError(f"a token has {top_k} distinct experts, there are {base['num_experts']}")
    shapes = [
        base | DTYPES[dtype] | {"max_tokens": tokens} | ({"in_flight": 1} if on_gpu and tokens > MANY_TOKENS else {})
        for tokens in token_counts
        for dtype in dtypes or DTYPES
    ]
    for shape in shapes:
        MoeConfig(**shape)
    return shapes

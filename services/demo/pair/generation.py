"""Prefill in chunks and greedy decoding, the same code for the streamed and for the one-process run.

Blocking: called on worker threads. Every step's logits are hashed, so that a run can be compared bit for bit without
keeping them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from transformers.cache_utils import Cache

from asyncfabric_services.demo.pair.verdict import Continuation
from asyncfabric_services.runner.runner import chunks


def prefill(model: Any, tokens: Sequence[int], cache: Cache, chunk: int) -> torch.Tensor:
    """Run the prompt through the model, `chunk` tokens at a time; return the last logits as float32 [vocabulary]."""
    logits = torch.empty(0)
    for start, end in chunks(len(tokens), chunk or len(tokens)):
        logits = _forward(model, tokens[start:end], cache)
    return logits


def decode(
    model: Any, cache: Cache, logits: torch.Tensor, count: int, on_token: Callable[[int], None] | None = None
) -> Continuation:
    """Go on greedily from the prompt's last `logits` for `count` tokens; `on_token` gets how many there are."""
    tokens: list[int] = []
    digests: list[str] = []
    while True:
        tokens.append(int(logits.argmax()))
        digests.append(blake2b(logits.numpy().tobytes(), digest_size=16).hexdigest())
        if on_token is not None:
            on_token(len(tokens))
        if len(tokens) == count:
            return Continuation(tuple(tokens), tuple(digests))
        logits = _forward(model, tokens[-1:], cache)


def _forward(model: Any, tokens: Sequence[int], cache: Cache) -> torch.Tensor:
    with torch.inference_mode():  # thread-local, hence here and not once per process
        ids = torch.tensor([list(tokens)], dtype=torch.int64, device=model.device)
        return forward(model, ids, cache).cpu()


def forward(model: Any, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Run [1][tokens] through the model; return the last logits as float32 [vocabulary], on the model's device."""
    asked: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    if ids.is_cuda:
        # Left to itself transformers makes no mask where attention can do without, but one while a graph is captured:
        # attention then takes another kernel, and other bits come out.
        before, new = cache.get_seq_length(), ids.shape[1]
        mask = torch.ones((new, before + new), dtype=torch.bool, device=ids.device).tril(before)
        asked["attention_mask"] = mask[None, None]
    last: torch.Tensor = model(**asked).logits[0, -1].float().clone()
    return last

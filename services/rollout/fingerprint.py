"""What distinguishes versions: a hash of all tensors of a replica, and one of its logits. Blocking; on any thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from asyncfabric_services.rollout.fused_model import FusedModel, RankTensors

PROBE_TOKENS = 16


def bytes_digest(ranks: Sequence[RankTensors]) -> str:
    """Return a hash of names and bytes of all tensors of all ranks."""
    digest = xxhash.xxh3_128()
    for rank in ranks:
        for name in sorted(rank):
            digest.update(name.encode())
            digest.update(rank[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def logits_digest(model: FusedModel, ranks: Sequence[RankTensors]) -> str:
    """Return a hash of the bits of the logits of a fixed batch, one prompt for each group of ranks."""
    groups = model.layout.ranks // model.layout.tp
    probe = torch.arange(groups * PROBE_TOKENS).reshape(groups, PROBE_TOKENS) * 37 % model.card.vocab
    return xxhash.xxh3_128_hexdigest(model.logits(ranks, probe).contiguous().view(torch.uint8).numpy().data)

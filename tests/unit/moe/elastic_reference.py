"""What each rank of a test of ElasticBuffer sends and gets, worked out by plain torch from the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deep_ep_ranks import drawn_tokens

from asyncfabric.integrations.deep_ep import EPHandle
from asyncfabric.moe.fp8 import from_fp8, to_fp8

RANKS, EXPERTS, TOP_K, HIDDEN, MOST = 4, 12, 5, 256, 16
OWN, ROOM = EXPERTS // RANKS, 32


def tokens_of(rank: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Tokens of a rank, their experts and weights; rank 2 has none, some choices are masked."""
    return drawn_tokens(rank, seed, 0 if rank == 2 else 5 + 3 * rank, HIDDEN, EXPERTS, TOP_K)


def in_rank(idx: Any, rank: int) -> Any:
    return (idx >= 0) & (idx // OWN == rank)


class Right:
    """What a rank gets, worked out from the tokens of all."""

    def __init__(self, rank: int, seed: int = 0, alignment: int = 1) -> None:
        self.everyone = [tokens_of(source, seed) for source in range(RANKS)]
        self.places = [
            (source, token)
            for source, (_, idx, _) in enumerate(self.everyone)
            for token in torch.nonzero(in_rank(idx, rank).any(1))[:, 0].tolist()
        ]
        idx = [self.everyone[source][1][token] for source, token in self.places]
        self.idx = torch.full((len(idx), TOP_K), -1)
        for row, chosen in enumerate(idx):
            self.idx[row] = torch.where(in_rank(chosen, rank), chosen - rank * OWN, -1)
        self.weights = self.of(2).masked_fill(self.idx < 0, 0.0)
        self.counts = [int((self.idx == expert).sum()) for expert in range(OWN)]
        self.aligned = [-(-count // alignment) * alignment for count in self.counts]
        self.slots = torch.full((len(idx), TOP_K), -1)
        for expert in range(OWN):
            at = sum(self.aligned[:expert])
            for row, choice in torch.nonzero(self.idx == expert).tolist():
                self.slots[row, choice] = at
                at += 1

    def of(self, which: int, cast: Callable[[Any], Any] = lambda given: given) -> Any:
        """The x (0), experts (1) or weights (2) of the rows that come."""
        cases = [cast(given[which]) for given in self.everyone]
        rows = [cases[source][token] for source, token in self.places]
        return torch.stack(rows) if rows else cases[0][:0]

    def by_expert(self, rows: Any) -> Any:
        """The rows in their slots, zeros elsewhere."""
        made = torch.zeros(sum(self.aligned), *rows.shape[1:], dtype=rows.dtype)
        for row, choice in torch.nonzero(self.idx >= 0).tolist():
            made[self.slots[row, choice]] = rows[row]
        return made


def ring_sum(rank: int, seed: int, of_rank: Callable[[int], Any]) -> Any:
    """The sums over ranks of what each makes of this rank's tokens, in fp32, from this rank on."""
    x, idx, _ = tokens_of(rank, seed)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for far in range(RANKS):
        other = (rank + far) % RANKS
        total += torch.where(in_rank(idx, other).any(1, keepdim=True), of_rank(other).float(), 0.0)
    return total


def of_experts(x: Any, idx: Any, rank: int, dtype: Any) -> Any:
    """The sum of what the experts of a rank make of tokens: their number + 1 times the token, in bf16."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for choice in range(TOP_K):
        made = (x * (idx[:, choice, None] + 1).bfloat16()).float()
        total += torch.where(in_rank(idx[:, choice, None], rank), made, 0.0)
    return total.to(dtype)


def run_experts(rank: int, right: Right, rows: Any) -> Any:
    """What the experts of this rank make of rows by expert; padding becomes NaN."""
    outputs = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
    for expert in range(OWN):
        there = slice(at := sum(right.aligned[:expert]), at + right.counts[expert])
        outputs[there] = rows[there] * torch.tensor(rank * OWN + expert + 1).bfloat16()
    return outputs


def same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


def fp8_of(x: Any) -> Any:
    return to_fp8(x, 128)


def as_bf16(x: Any, fp8: bool) -> Any:
    return from_fp8(*fp8_of(x), torch.bfloat16) if fp8 else x


def check_handle(handle: EPHandle, right: Right, alignment: int, expanded: bool) -> None:
    assert isinstance(handle, EPHandle) and handle.do_expand == expanded
    assert (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank) == (EXPERTS, alignment, MOST)
    assert handle.topk_idx.shape[1] == TOP_K
    ends = [sum(source <= rank for source, _ in right.places) for rank in range(RANKS)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == right.counts
    begins = [sum(right.aligned[:expert]) for expert in range(OWN)]
    last = right.counts if expanded else right.aligned
    assert handle.psum_num_recv_tokens_per_expert.tolist() == [a + b for a, b in zip(begins, last, strict=True)]
    metadata = handle.recv_src_metadata[: len(right.places)]
    assert metadata[:, 0].tolist() == [source * MOST + token for source, token in right.places]
    first = [(row >= 0).nonzero()[0].item() for row in right.idx]
    assert metadata[:, 1].tolist() == [
        source * TOP_K + choice for (source, _), choice in zip(right.places, first, strict=True)
    ]
    assert torch.equal(metadata[:, 2:].long(), right.slots if expanded else torch.full_like(right.slots, -1))
    for each in (handle.psum_num_recv_tokens_per_expert, metadata, handle.num_unaligned_recv_tokens_per_expert):
        assert each.dtype == torch.int32

"""EPHandle: what a dispatch of ElasticBuffer of DeepEP's interface leaves for its combine. Values only, any thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncfabric.integrations.deep_ep.buffer import DispatchHandle
from asyncfabric.integrations.deep_ep.gpu_dispatch import GpuDispatchHandle


@dataclass(eq=False)
class EPHandle:
    """One layout of ElasticBuffer. Tensors are where the tokens are; those of numbers are int32.

    `step`, `recv_topk_idx`, `slots` and `came` are ours, the others DeepEP's. What only its kernels read is not there:
    dst_buffer_slot_idx, token_metadata_at_forward, channel_linked_list.

    Attributes:
        do_expand: whether rows were returned by expert.
        num_experts: of all ranks.
        expert_alignment: of the rows of each own expert.
        num_max_tokens_per_rank: tokens of a rank, at most.
        num_sms: as given; nothing uses it.
        topk_idx: experts of the own tokens, [tokens, top_k].
        num_recv_tokens: rows that came; without do_cpu_sync as many as may come.
        num_expanded_tokens: rows by expert with their padding; without do_cpu_sync as many as there may be.
        num_recv_tokens_per_expert_list: rows of each own expert with their padding; empty without do_cpu_sync.
        psum_num_recv_tokens_per_scaleup_rank: [ranks], where the rows of each rank end.
        psum_num_recv_tokens_per_expert: [own experts], where the rows of each expert end: with their padding, or with
            do_expand without that of the expert itself.
        num_unaligned_recv_tokens_per_expert: [own experts], rows of each expert without padding.
        recv_src_metadata: [num_recv_tokens, 2 + top_k]: source rank * num_max_tokens_per_rank + token; source rank *
            top_k + first own choice; with do_expand the place of each choice among the rows by expert, -1 for none.
        step: of the Buffer, the newest of this layout.
        recv_topk_idx: experts of the rows that came, as returned.
        slots: the places of choices; None without do_expand.
        came: rows that came, where tensors are on a host; else None.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    step: DispatchHandle | GpuDispatchHandle
    recv_topk_idx: torch.Tensor
    slots: torch.Tensor | None
    came: int | None

    def tensors(self) -> list[torch.Tensor]:
        """Return those that a combine, or the caller, may read."""
        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]

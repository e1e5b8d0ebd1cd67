"""The interface of DeepEP's `Buffer` over `asyncfabric.moe`, for host tensors over any rail.

    from asyncfabric.integrations import deep_ep
    buffer = deep_ep.Buffer(group, num_rdma_bytes=..., low_latency_mode=True)

Blocks the calling thread; the fabric and its exchanges run on a thread of their own. All ranks make the same calls in
the same order. Names, arguments and shapes are those of the public interface (deepseek-ai/DeepEP, V1); what has no
meaning on a host stands in docs/guide/moe.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from asyncfabric import FabricConfig
from asyncfabric.integrations.deep_ep_low_latency import LowLatencyCalls, LowLatencyHandle, Tokens
from asyncfabric.integrations.deep_ep_rows import (
    about_rows,
    about_width,
    check_choices,
    experts_of_rank,
    layout_of,
    read_about,
    with_biases,
)
from asyncfabric.integrations.deep_ep_stand_ins import Config, EventOverlap, refuse
from asyncfabric.integrations.line_room import LineRoom
from asyncfabric.integrations.step_line import LineStep

__all__ = ["Buffer", "Config", "DispatchHandle", "EventOverlap", "LowLatencyHandle"]

Bias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class DispatchHandle:
    """What `Buffer.dispatch` returns for `Buffer.combine`, and for a dispatch by the same layout.

    Attributes:
        rows: the newest step of this layout.
        about: the step of experts and weights; None where none were given.
        is_token_in_rank: where the tokens go.
    """

    rows: LineStep
    about: LineStep | None
    is_token_in_rank: torch.Tensor


class Buffer(LowLatencyCalls):
    """Expert-parallel communication of one rank.

    Attributes:
        rank: of this process.
        group_size: ranks of the group.
        group: the group.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        fabric_config: FabricConfig | None = None,
        max_tokens_per_rank: int = 4096,
        patience_s: float = 100.0,
    ) -> None:
        """Open a fabric and meet the other ranks.

        What sizes and tunes GPU memory and queue pairs is taken and not used: buffers are sized by the calls, and freed
        by `destroy`, with the object or at the end of the program.

        Args:
            group: of torch.distributed; or None, and `comm`.
            num_nvl_bytes: not used.
            num_rdma_bytes: not used.
            low_latency_mode: not used; both kinds of calls are always there.
            num_qps_per_rank: not used.
            allow_nvlink_for_low_latency_mode: not used.
            allow_mnnvl: not used.
            use_fabric: not used.
            explicitly_destroy: not used.
            enable_shrink: must be false; see `exclude`.
            comm: of mpi4py, in place of the group.
            fabric_config: rails and so on.
            max_tokens_per_rank: most tokens of one `dispatch`; equal on all ranks.
            patience_s: seconds that one half of a call waits for other ranks.
        """
        refuse(enable_shrink=enable_shrink)
        self._room = LineRoom(self, group, comm, fabric_config, patience_s)
        self.group: Any = group if group is not None else comm
        self.rank: int = self._room.rank
        self.group_size: int = self._room.ranks
        self._max_tokens = max_tokens_per_rank

    def destroy(self) -> None:
        """Close everything; what this rank sent is drained. A second call does nothing."""
        self._room.close()

    def exclude(self, ranks: list[int]) -> None:
        """Go on without ranks: all others call it with the same ones. Their experts count as masked.

        Steps that are open are lost, and handles with them. Not part of DeepEP's interface.

        Raises:
            MissingRankError: another rank is lost, or does not follow in time.
        """
        self._room.exclude(ranks)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return False: nothing here runs on a GPU."""
        return False

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Note a number that nothing uses; raises ValueError for an odd one."""
        if new_num_sms % 2:
            raise ValueError(f"the number of SMs must be even, got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event that is over."""
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a configuration that nothing uses."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return a configuration that nothing uses."""
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Return (tokens for each rank, None, tokens for each expert, which token goes to which rank, event)."""
        layout = layout_of(topk_idx, num_experts, self.group_size)
        return layout.tokens_per_rank, None, layout.tokens_per_expert, layout.is_token_in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tokens,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]:
        """Send each token once to every rank that it goes to.

        x is bf16 [tokens, hidden], or float8_e4m3fn with float32 scales [tokens, blocks]; the rest as in DeepEP.

        Returns:
            (rows in the order of ranks, then of tokens; their experts, counted from this rank's first, -1 for those of
            others; their weights, float32, 0 for those of others; rows of each own expert, rounded up to
            `expert_alignment`; handle; event). With a handle: rows and event.

        Raises:
            TypeError, ValueError: what does not fit, or is not there on a host.
            MissingRankError: a rank is lost or late.
        """
        refuse(num_worst_tokens=num_worst_tokens)
        data, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise ValueError("a dispatch by the layout of a handle takes no topk_idx and no topk_weights")
            handle.rows = self._send(data, scales, handle.is_token_in_rank)
            return _rows(handle.rows), None, None, None, None, EventOverlap()
        if is_token_in_rank is None or num_tokens_per_expert is None:
            raise ValueError("give is_token_in_rank and num_tokens_per_expert of get_dispatch_layout, or a handle")
        if topk_idx is not None:
            check_choices(len(data), topk_idx, topk_weights)
        step, about = self._send(data, scales, is_token_in_rank), None
        recv_idx = recv_weights = None
        own = experts_of_rank(len(num_tokens_per_expert), self.group_size)
        if topk_idx is not None and topk_weights is not None:
            about = self._send(about_rows(topk_idx, topk_weights), None, is_token_in_rank, wide=True)
            reported, top_k = _rows(about), topk_idx.shape[1]
            assert isinstance(reported, torch.Tensor)
            recv_idx, recv_weights = read_about(reported, top_k, range(self.rank * own, (self.rank + 1) * own))
            counts = torch.bincount(recv_idx[recv_idx >= 0], minlength=own).tolist()
        else:
            everywhere = torch.tensor(self._room.gathered(num_tokens_per_expert.tolist()), dtype=torch.int64).sum(0)
            counts = everywhere[self.rank * own : (self.rank + 1) * own].tolist()
        rounded = [-(-count // expert_alignment) * expert_alignment for count in counts]
        made = DispatchHandle(step, about, is_token_in_rank)
        return _rows(step), recv_idx, recv_weights, rounded, made, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias | None = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return (for each own token the sum of its rows from all ranks, that of their weights, event); no weighting.

        x is bf16 [rows, hidden], in the order of the rows that were dispatched. Sums are in fp32 in a fixed order; of
        the weights that `dispatch` returned they are those that were dispatched, 0 for masked choices.
        Takes what DeepEP's takes; raises what `dispatch` raises.
        """
        about: LineStep | None = None
        if topk_weights is not None:
            top_k = topk_weights.shape[1]
            rows = torch.zeros(len(topk_weights), about_width(top_k), dtype=torch.float32)
            rows[:, :top_k] = topk_weights
            if handle.about is None:
                nothing = torch.zeros(len(handle.is_token_in_rank), about_width(top_k), dtype=torch.float32)
                handle.about = self._send(nothing, None, handle.is_token_in_rank, wide=True)
            about = handle.about.line.send_back(handle.about, rows)
        step = handle.rows.line.send_back(handle.rows, x.contiguous())
        weights = None
        if topk_weights is not None and about is not None:
            weights = about.line.receive_back(about)[:, : topk_weights.shape[1]].contiguous()
        return with_biases(step.line.receive_back(step), bias), weights, EventOverlap()

    def _send(
        self, data: torch.Tensor, scales: torch.Tensor | None, in_rank: torch.Tensor, *, wide: bool = False
    ) -> LineStep:
        """Dispatch rows to ranks: in this exchange each rank is one expert."""
        block = 0 if scales is None else data.shape[1] // scales.shape[1]
        sums = torch.float32 if wide else torch.bfloat16
        ranks = self.group_size
        line = self._room.line(ranks, ranks, data.shape[1], self._max_tokens, data.dtype, block, sums)
        indices = torch.where(in_rank, torch.arange(ranks, dtype=torch.int64), -1)
        return line.send(data.contiguous(), indices, None if scales is None else scales.contiguous())


def _rows(step: LineStep) -> Tokens:
    handle = step.line.receive(step)
    assert handle.rows is not None
    return handle.rows if handle.scales is None else (handle.rows, handle.scales)

"""Buffer of DeepEP's interface over `asyncfabric.moe`: host tensors over any rail, GPU tensors by kernels.

One thread calls; the fabric and the exchanges of host tensors run on a thread of their own. Calls on host tensors
block; those on GPU tensors return when the work is on a stream. All ranks make the same calls in the same order. Names,
arguments and shapes are those of the public interface (deepseek-ai/DeepEP, V1); docs/guide/moe.md lists what differs.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from asyncfabric import FabricConfig
from asyncfabric.integrations.deep_ep.events import EventHandle, EventOverlap, refuse
from asyncfabric.integrations.deep_ep.gpu_dispatch import GpuDispatch, GpuDispatchHandle, StreamOrder
from asyncfabric.integrations.deep_ep.gpu_room import FLOATS, GpuRoom
from asyncfabric.integrations.deep_ep.line_room import LineRoom
from asyncfabric.integrations.deep_ep.low_latency import LowLatencyCalls, Tokens
from asyncfabric.integrations.deep_ep.masks import MaskCalls
from asyncfabric.integrations.deep_ep.rows import (
    Bias,
    about_rows,
    about_width,
    check_choices,
    experts_of_rank,
    layout_of,
    read_about,
    with_biases,
)
from asyncfabric.integrations.deep_ep.step_line import LineStep
from asyncfabric.integrations.deep_ep.tuning import Config

HOPPER = 9
MAX_TOKENS, MAX_TOKENS_VARIABLE = 4096, "ASYNCFABRIC_DEEP_EP_MAX_TOKENS"


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


class Buffer(MaskCalls, LowLatencyCalls):
    """Expert-parallel communication of one rank.

    Attributes:
        rank: of this process.
        group_size: ranks of the group.
        group: the group.
        num_nvl_bytes, num_rdma_bytes, low_latency_mode, explicitly_destroy: as given.
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
        max_tokens_per_rank: int | None = None,
        patience_s: float = 100.0,
        gpu_deadline_s: float = 100.0,
        hosts: Sequence[Hashable] | None = None,
        blocks: int | None = None,
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
            enable_shrink: not used; the mask calls are always there.
            comm: of mpi4py, in place of the group.
            fabric_config: rails and so on; None: the rails of ASYNCFABRIC_RAILS, or those of FabricConfig.
            max_tokens_per_rank: most tokens of one `dispatch`; equal on all ranks. None: the number in
                ASYNCFABRIC_DEEP_EP_MAX_TOKENS, or 4,096.
            patience_s: seconds that one half of a call on host tensors waits for other ranks; also opening an exchange.
            gpu_deadline_s: seconds that a kernel waits for another rank.
            hosts: names the host of each rank; None: ranks find it out.
            blocks: of a kernel, each on a multiprocessor of its own; None: as many as the GPU has.
        """
        self._room = LineRoom(self, group, comm, fabric_config, patience_s)
        self.group: Any = group if group is not None else comm
        self.rank: int = self._room.rank
        self.group_size: int = self._room.ranks
        self.num_nvl_bytes: int = num_nvl_bytes
        self.num_rdma_bytes: int = num_rdma_bytes
        self.low_latency_mode: bool = low_latency_mode
        self.explicitly_destroy: bool = explicitly_destroy
        self._max_tokens: int = max_tokens_per_rank or int(os.environ.get(MAX_TOKENS_VARIABLE) or MAX_TOKENS)
        self._gpus = GpuRoom(self._room, hosts, blocks, gpu_deadline_s)
        self._on_gpu = GpuDispatch(self._gpus, self._max_tokens)
        self._masked: set[int] = set()
        self._gone: set[int] = set()

    def destroy(self) -> None:
        """Close everything; what this rank sent is drained. A second call does nothing."""
        self._room.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return whether there is a GPU that the kernels run on."""
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= HOPPER

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Note a number that nothing uses; raises ValueError for an odd one."""
        if new_num_sms % 2:
            raise ValueError(f"the number of SMs must be even, got {new_num_sms}")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of what is on the current stream up to now."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream of `dispatch`, `combine` and of low-latency calls with `async_finish`, on GPU tensors."""
        return self._gpus.comm.stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Refuse: ranks store to what exchanges allocate, and there is no one buffer.

        Raises:
            ValueError: always.
        """
        raise ValueError("get_local_buffer_tensor is not there: exchanges have memory of their own, of no one dtype")

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
        streams = StreamOrder(previous_event, async_finish, allocate_on_comm_stream)
        if not topk_idx.is_cuda:
            layout, event = layout_of(topk_idx, num_experts, self.group_size), EventOverlap()
        else:
            comm = self._gpus.comm
            current = comm.begin(streams.previous_event, [topk_idx])
            with torch.cuda.stream(comm.stream):
                layout = layout_of(topk_idx, num_experts, self.group_size)
            event = comm.end(current, layout, async_finish=async_finish)
        return layout.tokens_per_rank, None, layout.tokens_per_expert, layout.is_token_in_rank, event

    def dispatch(
        self,
        x: Tokens,
        handle: DispatchHandle | GpuDispatchHandle | None = None,
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
    ) -> tuple[
        Tokens,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        DispatchHandle | GpuDispatchHandle | None,
        EventOverlap,
    ]:
        """Send each token once to every rank that it goes to.

        x is bf16, fp16 or fp32 [tokens, hidden], or float8_e4m3fn with float32 scales [tokens, blocks]; the rest as in
        DeepEP. On a GPU the host waits for the number of rows, unless `num_worst_tokens` is how many are returned:
        then those behind the last are without experts, and nothing is counted.

        Returns:
            (rows in the order of ranks, then of tokens; their experts, counted from this rank's first, -1 for those of
            others; their weights, float32, 0 for those of others; rows of each own expert, rounded up to
            `expert_alignment`; handle; event). With a handle: rows and event.

        Raises:
            TypeError, ValueError: what does not fit, or is not there on a host.
            MissingRankError: a rank is lost or late.
        """
        streams = StreamOrder(previous_event, async_finish, allocate_on_comm_stream)
        data, scales = x if isinstance(x, tuple) else (x, None)
        if len(data) > self._max_tokens:
            raise ValueError(
                f"x has {len(data)} tokens, this Buffer takes {self._max_tokens}; give max_tokens_per_rank, or set"
                f" {MAX_TOKENS_VARIABLE}, equally on all ranks"
            )
        self._mask()
        if handle is not None and (topk_idx is not None or topk_weights is not None):
            raise ValueError("a dispatch by the layout of a handle takes no topk_idx and no topk_weights")
        if isinstance(handle, GpuDispatchHandle):
            routes = handle.is_token_in_rank
            again = self._on_gpu.dispatch(x, routes, None, None, None, 1, num_worst_tokens, streams, handle)
            return again[0], None, None, None, None, again[-1]
        if handle is not None:
            handle.rows = self._send(data, scales, handle.is_token_in_rank)
            return _rows(handle.rows), None, None, None, None, EventOverlap()
        if is_token_in_rank is None or num_tokens_per_expert is None:
            raise ValueError("give is_token_in_rank and num_tokens_per_expert of get_dispatch_layout, or a handle")
        if topk_idx is not None:
            check_choices(len(data), topk_idx, topk_weights)
        if data.is_cuda:
            return self._on_gpu.dispatch(
                x,
                is_token_in_rank,
                num_tokens_per_expert,
                topk_idx,
                topk_weights,
                expert_alignment,
                num_worst_tokens,
                streams,
            )
        refuse("on a host", num_worst_tokens=num_worst_tokens)
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
        handle: DispatchHandle | GpuDispatchHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
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
        streams = StreamOrder(previous_event, async_finish, allocate_on_comm_stream)
        self._mask()
        if isinstance(handle, GpuDispatchHandle):
            return self._on_gpu.combine(x, handle, topk_weights, bias, streams)
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

    internode_dispatch = dispatch
    internode_combine = combine

    def _send(
        self, data: torch.Tensor, scales: torch.Tensor | None, in_rank: torch.Tensor, *, wide: bool = False
    ) -> LineStep:
        """Dispatch rows to ranks: in this exchange each rank is one expert."""
        block = 0 if scales is None else data.shape[1] // scales.shape[1]
        sums = data.dtype if wide or data.dtype in FLOATS else torch.bfloat16
        ranks = self.group_size
        line = self._room.line(ranks, ranks, data.shape[1], self._max_tokens, data.dtype, block, sums)
        indices = torch.where(in_rank, torch.arange(ranks, dtype=torch.int64), -1)
        return line.send(data.contiguous(), indices, None if scales is None else scales.contiguous())


def _rows(step: LineStep) -> Tokens:
    handle = step.line.receive(step)
    assert handle.rows is not None
    return handle.rows if handle.scales is None else (handle.rows, handle.scales)

"""ElasticBuffer of DeepEP's interface (2.x) over the normal calls of Buffer, for host tensors and for GPU tensors.

One thread calls, and all ranks make the same calls in the same order, as with Buffer. Here is what ElasticBuffer adds:
the layout is worked out within `dispatch`, rows may be returned by expert, and shapes may be those of the worst case.
Names, arguments and shapes are those of the public interface (deepseek-ai/DeepEP); differences: docs/guide/moe.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from asyncfabric import FabricConfig
from asyncfabric.integrations.deep_ep.buffer import Buffer, DispatchHandle
from asyncfabric.integrations.deep_ep.elastic_handle import EPHandle
from asyncfabric.integrations.deep_ep.elastic_numbers import ElasticNumbers
from asyncfabric.integrations.deep_ep.elastic_rows import LayoutSettings, check_again, new_handle, returned_rows
from asyncfabric.integrations.deep_ep.events import EventHandle, EventOverlap, refuse
from asyncfabric.integrations.deep_ep.expansion import folded, folded_weights
from asyncfabric.integrations.deep_ep.gpu_dispatch import GpuDispatchHandle, Tokens
from asyncfabric.integrations.deep_ep.gpu_streams import CommStream, ElasticOrder
from asyncfabric.integrations.deep_ep.other_traffic import OtherTraffic
from asyncfabric.integrations.deep_ep.rows import Bias, check_choices, experts_of_rank
from asyncfabric.integrations.deep_ep.tuning import elastic_size_hint

Event = EventHandle | EventOverlap | None


class ElasticBuffer(ElasticNumbers, OtherTraffic):
    """Expert-parallel communication of one rank, with the calls of DeepEP's second interface.

    Attributes:
        group: the group.
        rank_idx: of this process.
        num_ranks: ranks of the group.
        num_bytes: as given, or the size hint of the settings; nothing depends on it.
        num_max_tokens_per_rank: most tokens of one `dispatch`.
        num_allocated_qps, deterministic, allow_hybrid_mode, allow_multiple_reduction, prefer_overlap_with_compute,
            explicitly_destroy: as given.
        num_scaleout_ranks, num_scaleup_ranks: 1 and all; a token goes to each rank once, wherever it is.
        scaleout_rank_idx, scaleup_rank_idx: 0 and the rank.
        num_rdma_ranks, num_nvlink_ranks: hosts, and ranks of each; ranks and 1 where hosts have different numbers.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
        *,
        comm: Any = None,
        fabric_config: FabricConfig | None = None,
        hosts: Sequence[Hashable] | None = None,
        blocks: int | None = None,
    ) -> None:
        """Open a fabric and meet the other ranks; all give the same settings.

        Buffers are sized by the calls, and freed by `destroy`, with the object or at the end of the program.

        Args:
            group: of torch.distributed; or None, and `comm`.
            num_bytes: not used. Without it `num_max_tokens_per_rank` and `hidden` have to be given.
            num_cpu_bytes: refused, since only what `OtherTraffic` refuses has memory on the host.
            num_max_tokens_per_rank: most tokens of one `dispatch`; 0: the number in ASYNCFABRIC_DEEP_EP_MAX_TOKENS, or
                4,096.
            hidden: for the size hint.
            num_topk: for the size hint.
            use_fp8_dispatch: for the size hint.
            deterministic: not used; rows and sums are always in the same order.
            allow_hybrid_mode: not used.
            allow_multiple_reduction: where false, outputs by expert are not rounded before ranks are added up; they
                travel in fp32.
            prefer_overlap_with_compute: not used.
            sl_idx: not used.
            num_allocated_qps: not used.
            num_cpu_timeout_secs: seconds that one half of a call on host tensors waits for other ranks; also opening
                an exchange.
            num_gpu_timeout_secs: seconds that a kernel waits for another rank.
            explicitly_destroy: not used.
            comm: of mpi4py, in place of the group.
            fabric_config: rails and so on; None: the rails of ASYNCFABRIC_RAILS, or those of FabricConfig.
            hosts: names the host of each rank; None: ranks find it out.
            blocks: of a kernel, each on a multiprocessor of its own; None: as many as the GPU has.

        Raises:
            ValueError: what does not fit, or is not there.
        """
        refuse("in an exchange of experts", num_cpu_bytes=num_cpu_bytes)
        if num_bytes is None and (num_max_tokens_per_rank <= 0 or hidden <= 0):
            raise ValueError("give num_bytes, or num_max_tokens_per_rank and hidden")
        self._calls = Buffer(
            group,
            comm=comm,
            fabric_config=fabric_config,
            max_tokens_per_rank=num_max_tokens_per_rank,
            patience_s=num_cpu_timeout_secs,
            gpu_deadline_s=num_gpu_timeout_secs,
            hosts=hosts,
            blocks=blocks,
        )
        self.group: Any = self._calls.group
        self.rank_idx: int = self._calls.rank
        self.num_ranks: int = self._calls.group_size
        self.num_max_tokens_per_rank: int = self._calls._max_tokens
        if num_bytes is None:
            sizes = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction
            num_bytes = elastic_size_hint(self.num_ranks, *sizes)
        self.num_bytes: int = num_bytes
        self.num_allocated_qps: int = num_allocated_qps
        self.deterministic: bool = deterministic
        self.allow_hybrid_mode: bool = allow_hybrid_mode
        self.allow_multiple_reduction: bool = allow_multiple_reduction
        self.prefer_overlap_with_compute: bool = prefer_overlap_with_compute
        self.explicitly_destroy: bool = explicitly_destroy
        self.num_scaleout_ranks: int
        self.num_scaleup_ranks: int
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx: int = 0
        self.scaleup_rank_idx: int = self.rank_idx
        self.num_rdma_ranks: int
        self.num_nvlink_ranks: int
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def destroy(self) -> None:
        """Close everything; what this rank sent is drained. A second call does nothing."""
        self._calls.destroy()

    def exclude(self, ranks: list[int]) -> None:
        """Go on without ranks, as `Buffer.exclude` does. Not part of DeepEP's interface."""
        self._calls.exclude(ranks)

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of what is on the current stream up to now."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the stream of `dispatch` and `combine` on GPU tensors."""
        return self._calls.get_comm_stream()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait for all ranks, with what each has put on its current stream and on the communication stream.

        The host waits, also without `with_cpu_sync`, which has it wait for all streams of the GPU.

        Args:
            use_comm_stream: not used.
            with_cpu_sync: wait for the whole GPU, before and after.
            sequential: not used.
        """
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_gpu and with_cpu_sync:
            torch.cuda.synchronize()
        elif on_gpu:
            torch.cuda.current_stream().synchronize()
            self.get_comm_stream().synchronize()
        self._calls._room.gathered(None)

    def dispatch(
        self,
        x: Tokens,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to every rank that has an expert of it.

        x is bf16, fp16 or fp32 [tokens, hidden], or float8_e4m3fn with scales [tokens, groups] of 4 bytes, float32 or
        int32; the rest as in DeepEP. Rows are in the order of ranks, then of tokens; with `do_expand` each row stands
        once for every own expert of it, in the order of experts, and each expert's begin at a multiple of
        `expert_alignment`. Padding is zeros. Without `do_cpu_sync` there are as many rows as there may be.

        Returns:
            (rows, with scales where they were given; their experts, counted from this rank's first, -1 for those of
            others, None with `do_expand`; their weights, float32, 0 for those of others, None where none were given,
            [rows] with `do_expand`; handle; event). With a handle the same layout is used again, and the handle is that
            one; `topk_weights` may be given.

        Raises:
            TypeError, ValueError: what does not fit.
            MissingRankError: a rank is lost or late.
        """
        order = ElasticOrder(
            previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream
        )
        data, scales = x if isinstance(x, tuple) else (x, None)
        if do_zero_padding and not do_expand:
            raise ValueError("do_zero_padding=True needs do_expand=True")
        if scales is not None and scales.dtype not in (torch.float32, torch.int32):
            raise TypeError(f"scales must be float32, or four exponents in an int32, got {scales.dtype}")
        given: Tokens = data if scales is None else (data, scales.view(torch.float32))
        stats, most = cumulative_local_expert_recv_stats, self._most(num_max_tokens_per_rank, handle, len(data))
        settings: LayoutSettings | None = None
        if handle is not None:
            check_again(handle, topk_idx, num_experts, expert_alignment, do_cpu_sync, do_expand)
            check_choices(len(data), handle.topk_idx, topk_weights)
        elif topk_idx is not None and num_experts is not None:
            check_choices(len(data), topk_idx, topk_weights)
            exact, sms = do_cpu_sync is not False, num_sms or Buffer.num_sms
            settings = LayoutSettings(
                self.rank_idx, self.num_ranks, num_experts, expert_alignment or 1, most, exact, do_expand, sms
            )
            self._check(settings, stats, data)
        else:
            raise ValueError("give topk_idx and num_experts, or a handle")
        with order.on_comm(self._comm(data), [data, scales, topk_idx, topk_weights, stats]) as work:
            if handle is not None:
                rows, weights = self._again(given, topk_weights, handle)
            else:
                assert settings is not None and topk_idx is not None
                rows, idx, weights, counts, step = self._routed(
                    given, topk_idx, topk_weights, settings.num_experts, settings.alignment, settings.worst
                )
                handle = new_handle(settings, topk_idx.clone() if do_handle_copy else topk_idx, idx, counts, step)
                work.outputs += handle.tensors()
                if stats is not None:
                    stats.add_(handle.num_unaligned_recv_tokens_per_expert)
            dtype = None if scales is None else scales.dtype
            recv = returned_rows(
                rows, weights, dtype, handle, expanded=do_expand, by_columns=use_tma_aligned_col_major_sf
            )
            work.outputs += recv
        return recv.x if recv.scales is None else (recv.x, recv.scales), recv.idx, recv.weights, handle, work.event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return (for each own token the sum of its rows from all ranks, that of their weights, event); no weighting.

        x is bf16, or fp16 or fp32 where that was dispatched, as many rows as the dispatch returned, by expert where it
        returned them so; then a rank's outputs for a token are added up first, in fp32 and the order of choices, and
        rounded unless the buffer has allow_multiple_reduction=False. Sums over ranks are in fp32 in a fixed order;
        biases are added as in `Buffer.combine`. Weights are [rows, top_k], or [rows] by expert; those of experts of
        other ranks do not count.

        Raises:
            TypeError, ValueError: what does not fit.
            MissingRankError: a rank is lost or late.
        """
        order = ElasticOrder(
            previous_event, previous_event_before_epilogue, async_with_compute_stream, allocate_on_comm_stream
        )
        expanded = handle.slots if handle.do_expand else None
        count = handle.num_recv_tokens if expanded is None else handle.num_expanded_tokens
        if len(x) != count:
            raise ValueError(f"x has {len(x)} rows, the dispatch of this handle returned {count}")
        shape = [count] if expanded is not None else [count, handle.topk_idx.shape[1]]
        if topk_weights is not None and list(topk_weights.shape) != shape:
            raise ValueError(f"topk_weights must have the shape {shape}, got {list(topk_weights.shape)}")
        wide = expanded is not None and not self.allow_multiple_reduction and x.dtype != torch.float32
        biases: Any = bias if isinstance(bias, tuple) else (bias,)
        with order.on_comm(self._comm(x), [x, topk_weights, *biases]) as work:
            rows, weights = x, topk_weights
            if expanded is not None:
                rows = folded(x, expanded, torch.float32 if wide else x.dtype)
                weights = None if topk_weights is None else folded_weights(topk_weights, expanded)
            elif topk_weights is not None:
                weights = torch.where(handle.recv_topk_idx >= 0, topk_weights, 0.0)
            if handle.came is not None:
                rows, weights = rows[: handle.came], None if weights is None else weights[: handle.came]
            if wide and isinstance(handle.step, DispatchHandle):
                # The exchange of host tensors rounds to what was dispatched: one of zeros in fp32 has the same routes.
                empty = torch.zeros(len(handle.topk_idx), x.shape[1], dtype=torch.float32, device=x.device)
                self._calls.dispatch(empty, handle=handle.step)
            sums, summed, _ = self._calls.combine(rows, handle.step, topk_weights=weights, bias=bias)
            sums = sums.to(x.dtype)
            work.outputs += [sums, summed]
        return sums, summed, work.event

    def _comm(self, data: torch.Tensor) -> CommStream | None:
        return self._calls._gpus.comm if data.is_cuda else None

    def _most(self, given: int | None, handle: EPHandle | None, tokens: int) -> int:
        """Return the most tokens of a rank in this dispatch, which all ranks have to give alike."""
        before = self.num_max_tokens_per_rank if handle is None else handle.num_max_tokens_per_rank
        most = given or before
        if most > self.num_max_tokens_per_rank or (handle is not None and most != before):
            allowed = f"at most {before}" if handle is None else f"{before}, that of the handle"
            raise ValueError(f"num_max_tokens_per_rank must be {allowed}, got {most}")
        if tokens > most:
            raise ValueError(f"x has {tokens} tokens, num_max_tokens_per_rank is {most}")
        return most

    def _check(self, settings: LayoutSettings, stats: torch.Tensor | None, data: torch.Tensor) -> None:
        """Raise ValueError for statistics of another shape, and where a graph cannot wait for numbers."""
        own = experts_of_rank(settings.num_experts, self.num_ranks)
        if stats is not None and (stats.dtype != torch.int32 or list(stats.shape) != [own]):
            got = f"{stats.dtype} {list(stats.shape)}"
            raise ValueError(f"cumulative_local_expert_recv_stats must be torch.int32 [{own}], got {got}")
        if settings.exact and data.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a graph is being captured: dispatch cannot wait for the number of rows; give do_cpu_sync=False"
            )

    def _routed(
        self,
        x: Tokens,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_experts: int,
        alignment: int,
        worst: int,
    ) -> tuple[Tokens, torch.Tensor, torch.Tensor | None, list[int], DispatchHandle | GpuDispatchHandle]:
        """Dispatch by experts; return rows, their experts and weights, how many each own expert has, and the step."""
        _, _, per_expert, in_rank, _ = self._calls.get_dispatch_layout(topk_idx, num_experts)
        weights = topk_weights
        if weights is None:
            weights = torch.zeros(topk_idx.shape, dtype=torch.float32, device=topk_idx.device)
        rows, idx, recv_weights, counts, step, _ = self._calls.dispatch(
            x,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=topk_idx,
            topk_weights=weights,
            expert_alignment=alignment,
            num_worst_tokens=worst if topk_idx.is_cuda else 0,
        )
        assert idx is not None and counts is not None and step is not None
        return rows, idx, recv_weights if topk_weights is not None else None, counts, step

    def _again(
        self, x: Tokens, topk_weights: torch.Tensor | None, handle: EPHandle
    ) -> tuple[Tokens, torch.Tensor | None]:
        """Dispatch by a layout; the host knows how many rows there are, or may be."""
        known = handle.num_recv_tokens
        if topk_weights is None:
            worst = known if isinstance(handle.step, GpuDispatchHandle) else 0
            return self._calls.dispatch(x, handle=handle.step, num_worst_tokens=worst)[0], None
        rows, _, weights, _, handle.step = self._routed(
            x, handle.topk_idx, topk_weights, handle.num_experts, handle.expert_alignment, known
        )
        return rows, weights

"""The numbers that callers ask an ElasticBuffer of DeepEP's interface for: sizes, domains of ranks, multiprocessors.

Any thread.
"""

from __future__ import annotations

from typing import Any

from asyncfabric.integrations.deep_ep.buffer import Buffer
from asyncfabric.integrations.deep_ep.tuning import elastic_size_hint


class ElasticNumbers:
    """The calls of ElasticBuffer that move nothing."""

    num_ranks: int
    num_allocated_qps: int
    _calls: Buffer

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return the bytes that a rank receives at most in one half of a step, a multiple of 2 MiB.

        Nothing here depends on it.

        Raises:
            ValueError: no tokens, or no width.
        """
        sizes = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction
        return elastic_size_hint(group.size(), *sizes)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return (hosts, ranks of each), or (ranks, 1) where hosts have different numbers of ranks."""
        hosts = self._calls._gpus.hosts()
        each = {hosts.count(host) for host in hosts}
        return (len(set(hosts)), each.pop()) if len(each) == 1 else (self.num_ranks, 1)

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return (1, ranks): a token goes to each rank once, wherever it is."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return `Buffer.num_sms`, a number that nothing uses; `blocks` is how many multiprocessors a kernel has."""
        return Buffer.num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return a number that nothing uses, `num_allocated_qps` at most where that was given."""
        return min(num_sms, self.num_allocated_qps or num_sms)

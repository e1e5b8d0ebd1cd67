"""Config of DeepEP's interface: numbers that tune its kernels, and size hints by them. Pure values, any thread."""

from __future__ import annotations

from dataclasses import dataclass

NVL_PEERS = 8
"""Ranks of one host, at most: DeepEP's NUM_MAX_NVL_PEERS."""


@dataclass(frozen=True)
class Config:
    """Tuning of DeepEP's kernels; taken, and used for the size hints only.

    Attributes:
        num_sms: multiprocessors.
        num_max_nvl_chunked_send_tokens: tokens of a chunk over NVLink.
        num_max_nvl_chunked_recv_tokens: tokens of a receiver's buffer over NVLink.
        num_max_rdma_chunked_send_tokens: tokens of a chunk over RDMA.
        num_max_rdma_chunked_recv_tokens: tokens of a receiver's buffer over RDMA.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes that a rank receives in chunks from the ranks of its host; nothing here depends on it."""
        return min(num_ranks, NVL_PEERS) * self.num_max_nvl_chunked_recv_tokens * hidden_bytes * (self.num_sms // 2)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the same for ranks of other hosts; 0 where all ranks fit on one."""
        if num_ranks <= NVL_PEERS:
            return 0
        nodes = -(-num_ranks // NVL_PEERS)
        return 2 * nodes * self.num_max_rdma_chunked_recv_tokens * hidden_bytes * (self.num_sms // 2)

"""Config of DeepEP's interface: numbers that tune its kernels, and size hints. Pure values, any thread."""

from __future__ import annotations

from dataclasses import dataclass

NVL_PEERS = 8
"""Ranks of one host, at most: DeepEP's NUM_MAX_NVL_PEERS."""
ALIGNMENT_BYTES = 2 << 20
"""That sizes of an ElasticBuffer are a multiple of."""
SCALE_ELEMENTS = 32
"""Elements that share a scale, at least."""
MOST_CHOICES = 32
"""Of a token, where their number is not given."""


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


def elastic_size_hint(
    ranks: int, most: int, hidden: int, num_topk: int, use_fp8_dispatch: bool, allow_multiple_reduction: bool
) -> int:
    """Return the bytes that a rank of an ElasticBuffer receives at most in one half of a step; nothing depends on it.

    Args:
        ranks: how many there are.
        most: tokens of a rank.
        hidden: elements of a token.
        num_topk: choices of a token; 0: not known.
        use_fp8_dispatch: tokens are sent in fp8, with scales.
        allow_multiple_reduction: a rank sends one sum for a token.

    Raises:
        ValueError: no tokens, or no width.
    """
    if most <= 0 or hidden <= 0:
        raise ValueError(f"num_max_tokens_per_rank and hidden must be 1 or more, got {most} and {hidden}")
    top_k = num_topk or MOST_CHOICES
    token = hidden + -(-hidden // SCALE_ELEMENTS) * 4 if use_fp8_dispatch else 2 * hidden
    sent = ranks * most * (token + top_k * 12)
    back = most * (min(ranks, top_k) if allow_multiple_reduction else top_k) * (2 * hidden + top_k * 4)
    return -(-max(sent, back) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

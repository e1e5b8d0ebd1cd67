"""The mask calls of DeepEP's interface: which ranks are missing, and going on without them.

One thread calls. Masking a rank is noted; the next call that moves tokens goes on without all that were noted, together
with all ranks that are left.
"""

from __future__ import annotations

import torch

from asyncfabric.integrations.deep_ep.gpu_room import GpuRoom
from asyncfabric.integrations.deep_ep.line_room import LineRoom


class MaskCalls:
    """The calls of Buffer about lost ranks."""

    rank: int
    group_size: int
    _room: LineRoom
    _gpus: GpuRoom
    _masked: set[int]
    _gone: set[int]

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank: the next call that moves tokens goes on without it, with those that masked the same ranks.

        Raises:
            ValueError: no such rank, or the own one; or `mask` is false for a rank that the exchanges go on without.
        """
        if not 0 <= rank_to_mask < self.group_size or rank_to_mask == self.rank:
            raise ValueError(f"rank_to_mask must be another rank of {self.group_size}, got {rank_to_mask}")
        if mask:
            self._masked.add(rank_to_mask)
            return
        if rank_to_mask in self._gone:
            raise ValueError(f"rank {rank_to_mask} cannot come back: the exchanges go on without it; open a new Buffer")
        self._masked.discard(rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that is masked, or that a call or a kernel has waited for in vain, and 0 for others.

        Args:
            mask_status: int32 [ranks], on a GPU or a host.
        """
        if mask_status.dtype != torch.int32 or list(mask_status.shape) != [self.group_size]:
            got = f"{mask_status.dtype} {list(mask_status.shape)}"
            raise ValueError(f"mask_status must be torch.int32 [{self.group_size}], got {got}")
        missing = self._masked | self._gone | self._room.missing() | self._gpus.missing()
        mask_status.copy_(torch.tensor([rank in missing for rank in range(self.group_size)], dtype=torch.int32))

    def low_latency_clean_mask_buffer(self) -> None:
        """Forget the masks that no call has gone on without yet.

        Raises:
            ValueError: the exchanges go on without a rank, which cannot come back.
        """
        if self._gone:
            raise ValueError(f"ranks {sorted(self._gone)} cannot come back; open a new Buffer")
        self._masked.clear()

    def exclude(self, ranks: list[int]) -> None:
        """Go on without ranks now: all others call it with the same ones. Their experts count as masked.

        Steps that are open are lost, and handles with them. Not part of DeepEP's interface.

        Raises:
            MissingRankError: another rank is lost, or does not follow in time.
        """
        self._room.exclude(ranks)
        self._gpus.exclude(ranks)
        self._gone.update(ranks)

    def _mask(self) -> None:
        """Go on without the ranks that were masked since the last call."""
        if self._masked:
            ranks, self._masked = sorted(self._masked), set()
            self.exclude(ranks)

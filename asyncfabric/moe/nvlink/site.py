"""Site: what one rank is opened with, whatever the epoch: layout, GPU, launches, and which ranks are on which host.

Pure values, any thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from asyncfabric.moe.nvlink.layout import MAX_HOST_RANKS, NvlinkLayout


@dataclass(frozen=True, slots=True)
class Site:
    """A rank's place.

    Attributes:
        layout: of the exchange.
        rank: of this process.
        device: its GPU.
        blocks: of each launch; None: as many as there are multiprocessors.
        deadline_s: how long kernels wait.
        hosts: for each rank the first rank on the same host.
    """

    layout: NvlinkLayout
    rank: int
    device: torch.device
    blocks: int | None
    deadline_s: float
    hosts: tuple[int, ...]

    def far(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of some ranks that only a proxy reaches."""
        return tuple(rank for rank in ranks if self.hosts[rank] != self.hosts[self.rank])


def hosts_of(ranks: int, hosts: Sequence[Hashable] | None) -> tuple[int, ...]:
    """Return for each rank the first rank on the same host; None: all are on one.

    Raises:
        ValueError: not a host for each rank, or more ranks on one than reach each other's memory.
    """
    if hosts is None:
        hosts = [0] * ranks
    if len(hosts) != ranks:
        raise ValueError(f"hosts must name the host of each of {ranks} ranks, got {len(hosts)} of them")
    firsts: dict[Hashable, int] = {}
    found = tuple(firsts.setdefault(host, rank) for rank, host in enumerate(hosts))
    for host, first in firsts.items():
        if (count := found.count(first)) > MAX_HOST_RANKS:
            raise ValueError(f"ranks on one host can be {MAX_HOST_RANKS} at most on GPUs, got {count} on {host!r}")
    return found

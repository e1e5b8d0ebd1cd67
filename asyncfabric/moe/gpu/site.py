"""Site: what one rank is opened with, whatever the epoch: layout, GPU, launches, and which ranks are on which host.

Pure values, any thread. `Share` distinguishes ranks of one process on one GPU from those that take turns on it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncfabric.moe.gpu.layout import MAX_HOST_RANKS, NvlinkLayout

_PROCESS = os.urandom(8)
"""Of this process; numbers of processes are not unique among containers of a host."""
_SHARE = struct.Struct("<8sII")


@dataclass(frozen=True, slots=True)
class Share:
    """What the launches of a rank take of a GPU.

    Attributes:
        device: number of the GPU in its process.
        blocks: of a launch, each on a multiprocessor of its own.
        process: names the process.
    """

    device: int
    blocks: int
    process: bytes = _PROCESS

    def to_bytes(self) -> bytes:
        """Return it as it travels."""
        return _SHARE.pack(self.process, self.device, self.blocks)

    @classmethod
    def from_bytes(cls, text: bytes) -> Share:
        """Return what another rank sent."""
        process, device, blocks = _SHARE.unpack(text)
        return cls(device, blocks, process)


def check_shares(shares: Mapping[int, Share], multiprocessors: int) -> None:
    """Check that the launches of all ranks of a process on one GPU fit on it at once: each waits for all others.

    Ranks of other processes take turns with them, in slices of time.

    Args:
        shares: of all ranks.
        multiprocessors: of a GPU; all are of one kind.

    Raises:
        ValueError: they do not fit somewhere; kernels would wait for some that cannot start.
    """
    places: dict[tuple[bytes, int], dict[int, int]] = {}
    for rank, share in sorted(shares.items()):
        places.setdefault((share.process, share.device), {})[rank] = share.blocks
    for (_, device), blocks in places.items():
        if sum(blocks.values()) > multiprocessors:
            reported = ", ".join(f"rank {rank} {count}" for rank, count in blocks.items())
            raise ValueError(
                f"one process launches more blocks on cuda:{device} ({reported}) than it has multiprocessors"
                f" ({multiprocessors}): kernels would wait for some that cannot start; give fewer blocks="
            )


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
        first_rank, rank_stride: of a lane: its ranks in the whole exchange, which errors and verdicts name.
    """

    layout: NvlinkLayout
    rank: int
    device: torch.device
    blocks: int | None
    deadline_s: float
    hosts: tuple[int, ...]
    first_rank: int = 0
    rank_stride: int = 1

    def digest(self, present: Sequence[int]) -> str:
        """Return a digest of all that ranks have to agree on: the whole layout, hosts, and who is present.

        Also of what does not show in a block: a rank that has room for fewer choices of a token relies on all others to
        send no more of them.
        """
        agreed = ("nvlink", self.layout, tuple(present), self.hosts)
        return hashlib.sha256(repr(agreed).encode()).hexdigest()[:16]

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

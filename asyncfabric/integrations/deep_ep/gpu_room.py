"""GpuRoom: the exchanges among GPUs that a buffer has needed so far, and the streams that they run on.

Calls run on the caller's thread; exchanges are opened and changed on the portal's.
"""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from functools import cache, cached_property
from pathlib import Path

import torch

from asyncfabric.integrations.deep_ep.gpu_slots import SlotLine
from asyncfabric.integrations.deep_ep.gpu_steps import GpuLine
from asyncfabric.integrations.deep_ep.gpu_streams import CommStream, LaunchOrder
from asyncfabric.integrations.deep_ep.line_room import LineRoom
from asyncfabric.moe import MissingRankError, MoeConfig
from asyncfabric.moe.gpu import CudaMoeExchange, CudaRankExchange, open_moe_ranks, open_moe_slots

NO_LIMIT_BYTES = 1 << 50
"""Memory is what the caller's shapes need; where there is not so much, allocation fails by name."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class GpuRoom:
    """The exchanges of one rank among GPUs, each opened with all other ranks when it is needed first.

    Attributes:
        room: whose fabric they use.
    """

    def __init__(self, room: LineRoom, hosts: Sequence[Hashable] | None, blocks: int | None, deadline_s: float) -> None:
        """Use a room; `hosts` names the host of each rank, None: the ranks find it out."""
        self.room: LineRoom = room
        self._hosts = hosts
        self._blocks = blocks
        self._deadline_s = deadline_s
        self._lines: dict[MoeConfig, GpuLine] = {}
        self._slots: dict[MoeConfig, SlotLine] = {}

    @cached_property
    def comm(self) -> CommStream:
        """The communication stream, on the GPU that is current when it is asked for first."""
        return CommStream(self.device)

    @cached_property
    def device(self) -> torch.device:
        """The GPU of this rank: the one that is current when it is asked for first."""
        return torch.device("cuda", torch.cuda.current_device())

    def hosts(self) -> tuple[Hashable, ...]:
        """Return the host of each rank; the first call asks all ranks.

        No cached property: in Python 3.11 its lock is that of all instances, and ranks may be threads.
        """
        if self._hosts is None:
            self._hosts = self.room.gathered(_this_host())
        return tuple(self._hosts)

    def line(self, hidden: int, max_tokens: int, dtype: torch.dtype, words: int) -> GpuLine:
        """Return the steps of the exchange whose tokens have this many words at least; opens it where it is new.

        In it each rank is an expert, and a token goes to each rank once at most.

        Raises:
            ValueError: no exchange can have this shape, or a graph is being captured and it is new.
            DeviceError, MissingRankError: it cannot be opened.
        """
        ranks = self.room.ranks
        config = self._config(ranks, ranks, hidden, max_tokens, dtype, _block_for(hidden, words))
        if config not in self._lines:
            _check_capture(config)
            device, one_host = self.device, len(set(self.hosts())) == 1
            moe: CudaRankExchange = self.room.entered(
                lambda fabric, group: open_moe_ranks(
                    fabric,
                    group,
                    config,
                    device=device,
                    hosts=self.hosts(),
                    blocks=self._blocks,
                    deadline_s=self._deadline_s,
                ),
                limited=one_host,
            )
            self._meet()
            self._lines[config] = GpuLine(moe, LaunchOrder())
        return self._lines[config]

    def slots(
        self, num_experts: int, top_k: int, hidden: int, max_tokens: int, dtype: torch.dtype, block: int
    ) -> SlotLine:
        """Return the steps of the exchange with slots of this shape; opens it where it is new.

        Raises:
            ValueError: ranks are on several hosts, or as `line` does.
            DeviceError, MissingRankError: it cannot be opened.
        """
        config = self._config(num_experts, top_k, hidden, max_tokens, dtype, block)
        if config not in self._slots:
            _check_capture(config)
            if len(set(self.hosts())) > 1:
                raise ValueError(
                    f"low-latency calls on GPU tensors need all ranks on one host, these are on {set(self.hosts())};"
                    " dispatch and combine reach other hosts"
                )
            device = self.device  # of this thread: the portal's has another one
            moe = self.room.entered(
                lambda fabric, group: open_moe_slots(
                    fabric, group, config, device=device, blocks=self._blocks, deadline_s=self._deadline_s
                )
            )
            self._meet()
            self._slots[config] = SlotLine(moe, LaunchOrder())
        return self._slots[config]

    def missing(self) -> set[int]:
        """Return the ranks that kernels have waited for in vain, as far as is known now."""
        found: set[int] = set()
        for moe in self._exchanges():
            try:
                moe.check()
            except MissingRankError as error:
                found.update(error.ranks)
        return found

    def exclude(self, ranks: list[int]) -> None:
        """Go on without ranks in the exchanges that are open; open steps are lost."""
        for moe in self._exchanges():
            self.room.wait(moe.exclude, ranks)
        for line in self._lines.values():
            line.forget()
        for slots in self._slots.values():
            slots.forget()

    def _meet(self) -> None:
        """Wait until all have opened: where ranks share a GPU, opening beside a kernel that waits takes long."""
        self.room.gathered(None)

    def _exchanges(self) -> list[CudaMoeExchange]:
        return [*(line.moe for line in self._lines.values()), *(slots.moe for slots in self._slots.values())]

    def _config(
        self, num_experts: int, top_k: int, hidden: int, max_tokens: int, dtype: torch.dtype, block: int
    ) -> MoeConfig:
        self.room.check_open()
        return _config_of(num_experts, top_k, hidden, max_tokens, self.room.ranks, dtype, block)


@cache
def _block_for(hidden: int, words: int) -> int:
    """Return how many elements a word is for, so that a token has `words` of them at least; 0 where it has none."""
    if words > hidden:
        raise ValueError(f"{words} scales, weights and experts cannot travel with a token of {hidden} elements")
    return max(each for each in range(1, hidden + 1) if hidden % each == 0 and hidden // each >= words) if words else 0


@cache
def _config_of(
    num_experts: int, top_k: int, hidden: int, max_tokens: int, ranks: int, dtype: torch.dtype, block: int
) -> MoeConfig:
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens=max_tokens,
        ranks=ranks,
        in_dtype=str(dtype).removeprefix("torch."),
        scale_block=block,
        out_dtype=str(dtype if dtype in FLOATS else torch.bfloat16).removeprefix("torch."),
        buffer_limit_bytes=NO_LIMIT_BYTES,
    )


def _check_capture(config: MoeConfig) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"a graph is being captured, and the exchange of this shape is not open: {config}; make the same call once"
            " before the capture, on all ranks"
        )


def _this_host() -> str:
    """Return what hosts differ in: containers of one host have names of their own, but GPUs in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()

"""What DeepEP's interface costs over the exchange itself: a decode step of two ranks of this process, in graphs.

`python deep_ep_figure.py [OUT]` prints, and writes, microseconds of a step by both ways, with and without fp8. Both
ranks share cuda:0, with 60 blocks each, or have a GPU each where there are two; each has its stream. Kernels only:
graphs are replayed. With fp8 the interface casts tokens, and the exchange is given cast ones.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "property"))

from thread_comm import ThreadComm

from asyncfabric import FabricConfig
from asyncfabric.integrations.deep_ep import Buffer
from asyncfabric.moe import MoeGroup
from asyncfabric.moe.fp8 import to_fp8
from asyncfabric.moe.gpu import open_moe_cuda

RANKS, TOKENS, HIDDEN, EXPERTS, TOP_K = 2, 128, 7168, 256, 8
STEPS, ROUNDS = 20, 15
BLOCKS_OF_HALF = 60
POOL_BYTES = 2 << 30
PATIENCE_S = 120.0
Step = Callable[[], object]


class FigureRank:
    """One rank: its stream, its buffer, its tokens."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        """Open a buffer together with the other rank, each on a thread of its own."""
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        config = FabricConfig(rails=("local",))
        comm = ThreadComm(rank, values, barrier)
        self.blocks: int | None = BLOCKS_OF_HALF if torch.cuda.device_count() == 1 else None
        self.buffer = Buffer(None, comm=comm, fabric_config=config, blocks=self.blocks, gpu_deadline_s=20.0)
        self.stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        draws = torch.Generator().manual_seed(rank)
        self.x = torch.randn(TOKENS, HIDDEN, generator=draws).bfloat16().to(self.device)
        self.idx = torch.rand(TOKENS, EXPERTS, generator=draws).topk(TOP_K, dim=1)[1].to(self.device)
        self.weights = torch.rand(TOKENS, TOP_K, generator=draws).to(self.device)

    def opened(self, fp8: bool) -> tuple[Step, Step]:
        """Open both ways and return steps by the exchange, of tokens that are fp8 already, and by the interface."""
        torch.cuda.set_device(self.device)  # of this thread, which may have opened the other rank
        gpus = self.buffer._gpus
        kind, block = (torch.float8_e4m3fn, 128) if fp8 else (torch.bfloat16, 0)
        line = gpus.slots(EXPERTS, TOP_K, HIDDEN, TOKENS, kind, block)
        plain = line.moe.config
        moe = gpus.room.entered(
            lambda fabric, group: open_moe_cuda(
                fabric,
                MoeGroup(group.rank, group.addresses, f"{group.tag} plain"),
                plain,
                device=self.device,
                blocks=self.blocks,
                deadline_s=20.0,
            )
        )
        tokens, scales = to_fp8(self.x, 128) if fp8 else (self.x, None)
        outputs = torch.zeros(TOKENS * RANKS * TOP_K, HIDDEN, dtype=torch.bfloat16, device=self.device)
        sums = torch.zeros_like(self.x)
        slots = torch.zeros(len(moe.experts), RANKS * TOKENS, HIDDEN, dtype=torch.bfloat16, device=self.device)

        def exchange() -> None:
            moe.combine(outputs, moe.dispatch(tokens, self.idx, self.weights, scales), out=sums)

        def interface() -> None:
            _, _, handle, _, _ = self.buffer.low_latency_dispatch(self.x, self.idx, TOKENS, EXPERTS, use_fp8=fp8)
            self.buffer.low_latency_combine(slots, self.idx, self.weights, handle, out=sums)

        with torch.cuda.stream(self.stream):  # memory that no allocation has to ask the driver for
            torch.empty(POOL_BYTES, dtype=torch.uint8, device=self.device)
            torch.empty(1 << 20, dtype=torch.uint8, device=self.device)
        line.moe._ones.zero_().add_(1)
        torch.cuda.synchronize(self.device)
        return exchange, interface


def microseconds(ranks: list[FigureRank], steps: list[Step]) -> list[float]:
    """Return how long a step takes, of the slower rank, in each round."""
    for rank, step in zip(ranks, steps, strict=True):  # all is loaded once
        with torch.cuda.device(rank.device), torch.cuda.stream(rank.stream):
            step()
    for rank in ranks:
        torch.cuda.synchronize(rank.device)
    graphs = []
    for rank, step in zip(ranks, steps, strict=True):
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.device(rank.device), torch.cuda.graph(captured, stream=rank.stream):
            for _ in range(STEPS):
                step()
        graphs.append(captured)
    found = []
    for _ in range(ROUNDS):
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in ranks]  # type: ignore[no-untyped-call]
        for place in range(3):
            for rank, captured, mark in zip(ranks, graphs, marks, strict=True):
                with torch.cuda.device(rank.device), torch.cuda.stream(rank.stream):
                    if place:
                        mark[place - 1].record()
                    if place < 2:
                        captured.replay()
        for rank in ranks:
            torch.cuda.synchronize(rank.device)
        found.append(max(begin.elapsed_time(end) for begin, end in marks) * 1000 / STEPS)
    return found


def main(out: str | None) -> None:
    """Measure, print and write."""
    values, barrier = [None] * RANKS, threading.Barrier(RANKS)
    lines = []
    with ThreadPoolExecutor(RANKS) as pool:
        ranks = list(pool.map(lambda rank: FigureRank(rank, values, barrier), range(RANKS)))
        for fp8 in (False, True):
            pairs = list(pool.map(lambda rank, fp8=fp8: rank.opened(fp8), ranks))
            times = {
                name: [microseconds(ranks, [pair[place] for pair in pairs]) for _ in range(3)]
                for place, name in enumerate(("exchange", "interface"))
            }
            medians = {name: [round(statistics.median(each), 2) for each in found] for name, found in times.items()}
            more = statistics.median(medians["interface"]) - statistics.median(medians["exchange"])
            about = {"fp8": fp8, "ranks": RANKS, "gpus": torch.cuda.device_count(), "tokens": TOKENS}
            lines.append(json.dumps(about | medians | {"more_us": round(more, 2)}))
            print(lines[-1], flush=True)
        list(pool.map(lambda rank: rank.buffer.destroy(), ranks))
    if out:
        Path(out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)

"""One rank of a program for DeepEP's interface, as a process of its own on a GPU that ranks share, driven by a test."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from preloaded import PRELOADED

PATIENCE_S, DEADLINE_S, SHORT_DEADLINE_S = 100.0, 20.0, 6.0


def _main(pipe: Connection, rank: int, ranks: int, meeting: str, options: dict[str, Any]) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # beside another rank's kernel that waits, loading takes long
    import dispatch_cases
    import elastic_cases
    import slot_cases
    import torch
    import torch.distributed as dist
    import training_cases
    from deep_ep_tokens import MOST_TOKENS, settle

    from asyncfabric import FabricConfig
    from asyncfabric.integrations import deep_ep

    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(2)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    group = dist.new_group(list(range(ranks)))
    more = {"blocks": 32, "gpu_deadline_s": DEADLINE_S, "max_tokens_per_rank": MOST_TOKENS} | options
    buffer = deep_ep.Buffer(group, low_latency_mode=True, fabric_config=FabricConfig(rails=("local",)), **more)
    modules = slot_cases, dispatch_cases, elastic_cases, training_cases
    pipe.send("open")
    while True:
        name, *arguments = pipe.recv()
        if name == "leave":
            break
        try:
            case = next(found for module in modules if (found := getattr(module, name, None)))
            pipe.send(case(buffer, *arguments) or "right")
        except Exception:
            pipe.send(traceback.format_exc())
    settle()
    buffer.destroy()
    pipe.send("closed")
    pipe.recv()  # all have closed: the store of the group may go


class DeepEpRank:
    """A process with a rank."""

    def __init__(self, rank: int, ranks: int, meeting: Path, options: dict[str, Any]) -> None:
        """Start it."""
        self.pipe, far = PRELOADED.Pipe()
        self.process = PRELOADED.Process(target=_main, args=(far, rank, ranks, str(meeting), options))
        self.process.start()
        far.close()

    def receive(self) -> Any:
        """Return what it answers next."""
        assert self.pipe.poll(PATIENCE_S), "a rank does not answer"
        return self.pipe.recv()


class DeepEpRanks:
    """All ranks."""

    def __init__(self, ranks: list[DeepEpRank]) -> None:
        """Use processes that run."""
        self.ranks: list[DeepEpRank] = ranks

    def do(self, name: str, *arguments: Any) -> None:
        """Run a case of one of the modules of cases on all ranks at once, and fail where one does."""
        for rank in self.ranks:
            rank.pipe.send((name, *arguments))
        answers = [rank.receive() for rank in self.ranks]
        assert answers == ["right"] * len(answers), "\n".join(map(str, answers))

    def leave(self) -> None:
        """Let all ranks close and end."""
        for rank in self.ranks:
            rank.pipe.send(("leave",))
        assert [rank.receive() for rank in self.ranks] == ["closed"] * len(self.ranks)
        for rank in self.ranks:
            rank.pipe.send(None)
        for rank in self.ranks:
            rank.process.join(PATIENCE_S)
        assert [rank.process.exitcode for rank in self.ranks] == [0] * len(self.ranks)


@contextlib.contextmanager
def deep_ep_ranks(count: int, folder: Path, **options: Any) -> Iterator[DeepEpRanks]:
    """Start so many ranks, each with a Buffer; they are killed on leaving where they did not end."""
    found: list[DeepEpRank] = []
    try:
        found.extend(DeepEpRank(rank, count, folder / "meeting", options) for rank in range(count))
        assert [rank.receive() for rank in found] == ["open"] * count
        yield DeepEpRanks(found)
    finally:
        for rank in found:
            rank.process.kill()
            rank.process.join(PATIENCE_S)
            rank.pipe.close()

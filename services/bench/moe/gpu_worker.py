"""A measured process with one rank of an exchange among GPUs, and with NCCL for what it is compared with.

Runs on the process's own trio loop. One GPU for each process.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import trio

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeGroup
from asyncfabric.moe.gpu import CudaMoeExchange, CudaMoeHandle, open_moe_cuda
from asyncfabric_services.bench.moe.gpu_clock import WARM_ROUNDS, queued_times, single_times, sleep
from asyncfabric_services.bench.moe.gpu_counts import moved, rows_by_rank
from asyncfabric_services.bench.moe.workload import TokenLoad, expected, expert, tokens_of
from asyncfabric_services.bench.transfers.fabric_worker import FabricWorker

MANY_TOKENS, CHECKED_TOKENS = 512, 128
SETS, LARGE_SETS = 12, 4
"""Routes that take turns; checks of large shapes look at the first tokens only, whose sums cost the host most."""
COPY_BYTES = 1 << 30


class MoeGpuWorker(FabricWorker):
    """One rank; opened by `do_open`, `do_join` and `do_shape`."""

    _group: MoeGroup
    _hosts: list[int] | None
    _gpu: int
    _moe: CudaMoeExchange
    _given: list[TokenLoad]

    _nursery: trio.Nursery
    _leave: trio.Event
    _left: trio.Event | None = None

    async def beside(self) -> None:
        """Hold the exchange: its tasks live beside the calls."""
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    async def aclose(self) -> None:
        """Leave the process group and the fabric."""
        if dist.is_initialized():
            dist.destroy_process_group()
        await super().aclose()

    async def _hold(
        self, config: MoeConfig, tag: str, task_status: trio.TaskStatus[CudaMoeExchange] = trio.TASK_STATUS_IGNORED
    ) -> None:
        rank, left = self._group.rank, trio.Event()
        group = MoeGroup(rank, self._group.addresses, tag)
        async with open_moe_cuda(self._fabric, group, config, device=f"cuda:{self._gpu}", hosts=self._hosts) as moe:
            self._leave, self._left = trio.Event(), left
            task_status.started(moe)
            await self._leave.wait()
        left.set()

    async def do_join(self, addresses: list[str], rank: int, meeting: str, hosts: list[int] | None) -> tuple[int, str]:
        """Join the other ranks; `hosts`: as if each were on that one. Return how many GPUs all have, and its name.

        With `hosts`, ranks may be more than GPUs: they share them then, and NCCL, which refuses that, is left out.
        """
        world, gpus = len(addresses), torch.cuda.device_count()
        if gpus < world and (hosts is None or gpus == 0):
            raise af.DeviceError(f"{world} ranks need as many GPUs, torch sees {gpus}")
        self._gpu = rank % gpus
        torch.cuda.set_device(self._gpu)
        known = [af.FabricAddress.from_bytes(bytes.fromhex(each)) for each in addresses]
        self._group, self._hosts = MoeGroup(rank, known), hosts
        backend = "cpu:gloo,cuda:nccl" if world <= gpus else "gloo"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
        sleep(1000)
        return min(world, gpus), str(torch.cuda.get_device_name(self._gpu))

    async def do_limits(self) -> dict[str, float]:
        """Return bytes per microsecond of copies to the next GPU, inside, and to the host; and what nothing takes."""
        here = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{self._gpu}").random_()
        near = (self._gpu + 1) % torch.cuda.device_count()
        there, inside = torch.empty_like(here, device=f"cuda:{near}"), torch.empty_like(here)
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        copies = {"wire": there, "memory": inside, "pcie": host}
        found = {}
        for name, target in copies.items():

            def copy(_: int, target: torch.Tensor = target) -> None:
                target.copy_(here, non_blocking=True)

            found[name] = COPY_BYTES / statistics.median(queued_times({name: copy}, 3, 8)[name])
        nothing = queued_times({"nothing": lambda _: sleep(1)}, 2, 40)["nothing"]
        return found | {"memory": 2 * found["memory"], "empty_us": statistics.median(nothing)}

    async def do_shape(self, shape: dict[str, Any], tag: str, seed: int) -> dict[str, Any]:
        """Open an exchange of this shape, after closing the last.

        Returns:
            `moved`: rows that leave this GPU, or by the nodes this node, in a step, the mean of all routes; `rows`:
            those for each rank with the first routes; `buffer_bytes`.
        """
        if self._left is not None:
            self._leave.set()
            await self._left.wait()
        config, rank = MoeConfig(**shape), self._group.rank
        self._moe = await self._nursery.start(self._hold, config, tag)
        sets = [
            tokens_of(config, rank, seed + number)
            for number in range(SETS if config.max_tokens <= MANY_TOKENS else LARGE_SETS)
        ]
        self._given = [each.on(self._moe.device) for each in sets]
        rows = [rows_by_rank(config, rank, each.indices) for each in sets]
        moved = statistics.mean(sum(each) - each[rank] for each in rows)
        return {"moved": moved, "buffer_bytes": self._moe.buffer_bytes, "rows": rows[0]}

    async def do_check(self, seed: int) -> str:
        """Run two steps with other tokens and experts that differ, and compare bit for bit; "" is good."""
        moe, config = self._moe, self._moe.config
        for number in range(2):
            tokens = tokens_of(config, moe.rank, seed + number)
            handle = moe.dispatch(*tokens.on(moe.device).arguments)
            await moe.settled()
            result = moe.combine(run_experts(moe, handle), handle)
            await moe.settled()
            some = slice(0, CHECKED_TOKENS if config.max_tokens > MANY_TOKENS else None)
            wrong = (result[some].cpu() != expected(config, moe.rank, tokens.part(some))).any(dim=1)
            if bool(wrong.any()):
                return f"rank {moe.rank}: {int(wrong.sum())} of {len(wrong)} tokens are wrong"
        return ""

    async def do_steps(self, batches: int, rounds: int) -> dict[str, list[float]]:
        """Return microseconds of dispatch and combine of each round, with other routes in each."""
        moe, config = self._moe, self._moe.config
        handles = [moe.dispatch(*self._given[0].arguments)]
        await moe.settled()
        outputs = torch.randn(handles[0].rows.shape, device=moe.device, dtype=config.out_torch)
        out = moe.combine(outputs, handles[0])
        await moe.settled()

        def dispatch(number: int) -> None:
            handles[:] = [moe.dispatch(*self._given[number % len(self._given)].arguments)]

        def combine(_: int) -> None:
            moe.combine(outputs, handles[0], out=out)

        bodies = {"dispatch": dispatch, "combine": combine}
        if self._hosts is not None:
            return await single_times(bodies, batches * rounds)
        return queued_times(bodies, batches, rounds)

    async def do_counted(self, steps: int) -> dict[str, int]:
        """Do steps with the first routes; return what kernels stored to other ranks in the last of them.

        By the nodes nothing: they do so in two lanes, and what matters crosses between hosts.
        """
        moe = self._moe
        for _ in range(steps):
            handle = moe.dispatch(*self._given[0].arguments)
            moe.combine(torch.zeros_like(handle.rows, dtype=moe.config.out_torch), handle)
            await moe.settled()
        return moved(moe.config, moe.rank, handle) if moe.config.node_size == 1 else {}

    async def do_wall(self, rounds: int) -> list[float]:
        """Return microseconds of whole steps by the clock of the host, from the first call until all is done.

        Each begins when all ranks have ended the one before.
        """
        moe, config, found = self._moe, self._moe.config, []
        outputs = torch.zeros(0)
        for number in range(rounds + WARM_ROUNDS):
            await trio.to_thread.run_sync(dist.all_reduce, torch.zeros(1))
            begin = time.perf_counter_ns()
            handle = moe.dispatch(*self._given[number % len(self._given)].arguments)
            if outputs.shape != handle.rows.shape:
                outputs = torch.zeros(handle.rows.shape, device=moe.device, dtype=config.out_torch)
            moe.combine(outputs, handle)
            await moe.settled()
            if number >= WARM_ROUNDS:
                found.append((time.perf_counter_ns() - begin) / 1e3)
        return found

    async def do_nccl(self, tokens: int, top_k: int, hidden: int) -> list[float]:
        """Return microseconds of NCCL's all-to-all of a bf16 row for each choice: without routing, it has to pad so.

        Nothing where ranks share GPUs.
        """
        world = dist.get_world_size()
        if world > torch.cuda.device_count():
            return []
        here = torch.randn(tokens * top_k // world * world, hidden, device="cuda").to(torch.bfloat16)
        there = torch.empty_like(here)
        dist.all_to_all_single(there, here)
        return queued_times({"nccl": lambda _: dist.all_to_all_single(there, here)}, 4, 20)["nccl"]


def run_experts(moe: CudaMoeExchange, handle: CudaMoeHandle) -> torch.Tensor:
    """Return the outputs of a rank's experts for the rows that came; rows that do not count are NaN."""
    place = torch.arange(len(handle.rows), dtype=torch.int32, device=moe.device)
    numbers = torch.searchsorted(handle.offsets, place, right=True) - 1 + moe.experts.start
    outputs = expert(numbers[:, None], handle.rows, handle.scales, moe.config)
    counts = (handle.source_ranks >= 0) & (place < handle.offsets[-1])
    return torch.where(counts[:, None], outputs, float("nan"))

"""A measured process with one rank of an exchange, and with a gloo process group for the same payload.

torch takes one thread in each process: there are more processes than cores already.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import asyncfabric as af
from asyncfabric.moe import MoeConfig, MoeExchange, MoeGroup, MoeHandle, open_moe
from asyncfabric.moe.host.routing import Experts, owner_of_expert, owners
from asyncfabric.moe.host.traffic import row_counts, step_traffic
from asyncfabric_services.bench.moe.gloo import GlooRows, gloo_exchange
from asyncfabric_services.bench.moe.workload import TokenLoad, expected, run_experts, tokens_of
from asyncfabric_services.bench.transfers.fabric_worker import FabricWorker


class MoeWorker(FabricWorker):
    """One rank; opened by `do_open`, `do_join` and `do_shape`."""

    _group: MoeGroup
    _config: MoeConfig
    _moe: MoeExchange
    _tokens: TokenLoad
    _gloo: dict[str, GlooRows]
    _indices: list[Experts]

    async def aclose(self) -> None:
        """Leave the process group and the exchange."""
        if dist.is_initialized():
            dist.destroy_process_group()
        await super().aclose()

    async def do_join(self, addresses: list[str], rank: int, meeting: str) -> None:
        """Join the other ranks: by their addresses, and for gloo by a file that all know."""
        torch.set_num_threads(1)
        known = [af.FabricAddress.from_bytes(bytes.fromhex(each)) for each in addresses]
        self._group = MoeGroup(rank, known)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=len(addresses))

    async def do_shape(self, shape: dict[str, Any], tag: str, seed: int) -> dict[str, int]:
        """Open an exchange of this shape; return what the protocol states that one step of this rank sends."""
        config = self._config = MoeConfig(**shape)
        group = MoeGroup(self._group.rank, self._group.addresses, tag)
        self._moe = await self._stack.enter_async_context(open_moe(self._fabric, group, config))
        rank, everyone = group.rank, range(config.ranks)
        self._tokens = tokens_of(config, rank, seed)
        indices = [tokens_of(config, each, seed).indices.numpy() for each in everyone]
        counts = row_counts(config, indices)
        # The rows that ours puts on the wire: one for each rank that a token goes to, none for the own rank.
        send = [int(counts[rank, each]) if each != rank else 0 for each in everyone]
        receive = [int(counts[each, rank]) if each != rank else 0 for each in everyone]
        # The payload as it is without that: one row for each choice, those of the own rank too.
        owner = owner_of_expert([config.experts_of(each) for each in everyone], config.num_experts)
        choices = [np.bincount(owners(each, owner).reshape(-1), minlength=config.ranks) for each in indices]
        self._gloo = {
            "wire": GlooRows(config, send, receive),
            "payload": GlooRows(config, choices[rank].tolist(), [int(each[rank]) for each in choices]),
        }
        self._indices = indices
        traffic = step_traffic(config, indices, rank)
        return {
            "requests": traffic.requests,
            "dispatch_writes": traffic.dispatch_writes,
            "bytes": traffic.dispatch_bytes + traffic.combine_bytes,
            "rows_bytes": self._gloo["wire"].payload_bytes,
            "payload_bytes": self._gloo["payload"].payload_bytes,
            "buffer_bytes": self._moe.buffer_bytes,
        }

    async def do_engine_bytes(self) -> int:
        """Return the bytes that the engine writes in one step; those for mapped memory are stored without it."""
        traffic = step_traffic(self._config, self._indices, self._moe.rank, self._moe.mapped_ranks)
        return traffic.dispatch_bytes + traffic.combine_bytes

    async def do_steps(self, count: int) -> dict[str, Any]:
        """Run steps whose experts give their rows back as they are; times begin when all ranks are there."""
        moe, tokens = self._moe, self._tokens
        dispatch_ns: list[int] = []
        combine_ns: list[int] = []
        handle = await moe.dispatch(tokens.x, tokens.indices, tokens.weights)
        await moe.combine(_as_they_are(handle, moe.config), handle)
        started = time.perf_counter_ns()
        for _ in range(count):
            begin = time.perf_counter_ns()
            handle = await moe.dispatch(tokens.x, tokens.indices, tokens.weights)
            between = time.perf_counter_ns()
            await moe.combine(_as_they_are(handle, moe.config), handle)
            dispatch_ns.append(between - begin)
            combine_ns.append(time.perf_counter_ns() - between)
        seconds = (time.perf_counter_ns() - started) / 1e9
        return {"seconds": seconds, "dispatch_ns": dispatch_ns, "combine_ns": combine_ns}

    async def do_gloo(self, count: int, which: str) -> dict[str, Any]:
        """Move rows there and back with gloo's all_to_all, without any packing: those of the wire or the payload."""
        rows = self._gloo[which]
        dist.barrier()
        started = time.perf_counter_ns()
        for _ in range(count):
            rows.move()
        return {"seconds": (time.perf_counter_ns() - started) / 1e9}

    async def do_gloo_exchange(self, count: int) -> dict[str, Any]:
        """Do with gloo what the exchange does: a row for each choice, grouped by expert there, weighted sums back."""
        config, tokens = self._config, self._tokens
        dist.barrier()
        started = time.perf_counter_ns()
        for _ in range(count):
            gloo_exchange(config, self._group.rank, tokens)
        return {"seconds": (time.perf_counter_ns() - started) / 1e9}

    async def do_check(self, seed: int) -> str:
        """Run one step with other tokens and experts that differ, and compare bit for bit; "" is good."""
        moe, config = self._moe, self._config
        tokens = tokens_of(config, moe.rank, seed)
        handle = await moe.dispatch(tokens.x, tokens.indices, tokens.weights)
        result = await moe.combine(run_experts(config, moe.experts, handle), handle)
        wanted = expected(config, moe.rank, tokens)
        by_gloo = gloo_exchange(config, moe.rank, self._tokens)
        summed = self._tokens.x.float() * self._tokens.weights.sum(1)[:, None]
        if not torch.allclose(by_gloo.float(), summed, 0.1, 0.1):
            return "the exchange over gloo, which ours is compared with, is wrong itself"
        wrong = (result != wanted).any(dim=1)
        return f"rank {moe.rank}: {int(wrong.sum())} of {len(wrong)} tokens are wrong" if bool(wrong.any()) else ""


def _as_they_are(handle: MoeHandle, config: MoeConfig) -> torch.Tensor:
    assert handle.rows is not None
    return handle.rows.to(config.out_torch)

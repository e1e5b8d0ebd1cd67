"""One rank of an exchange as a process: steps or goes on without others as ordered by JSON lines, one answer each."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
import trio

sys.path.insert(0, str(Path(__file__).parents[2] / "unit"))

from json_lines import answer
from moe_fixture import expected, run_experts, same_bits, tokens_of

import asyncfabric as af
from asyncfabric.moe import MissingRankError, MoeConfig, MoeExchange, MoeGroup, open_moe

PR_SET_PDEATHSIG = 1


class Rank:
    fabric: af.Fabric
    moe: MoeExchange

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.gone: tuple[int, ...] = ()

    async def do_open(self, rail: str, options: dict[str, Any]) -> dict[str, Any]:
        opened = af.open_fabric(af.FabricConfig(rails=(rail,), **options))
        self.fabric = await self.stack.enter_async_context(opened)
        return {"address": bytes(self.fabric.address).hex()}

    async def do_leave(self) -> dict[str, Any]:
        await self.stack.aclose()
        self.gone = ()
        return {}

    async def do_join(self, rank: int, addresses: list[str], config: dict[str, Any]) -> dict[str, Any]:
        known = [af.FabricAddress.from_bytes(bytes.fromhex(each)) for each in addresses]
        opened = open_moe(self.fabric, MoeGroup(rank, known), MoeConfig(**config))
        self.moe = await self.stack.enter_async_context(opened)
        return {"buffer_bytes": self.moe.buffer_bytes}

    async def do_steps(self, first: int, count: int) -> dict[str, Any]:
        """Run steps with changing routes; return how many were wrong, and a digest of all results."""
        moe, wrong, digest = self.moe, 0, hashlib.sha256()
        for seed in range(first, first + count):
            tokens = tokens_of(moe.config, moe.rank, seed)
            handle = await moe.dispatch(*tokens)
            result = await moe.combine(run_experts(moe, handle), handle)
            wrong += not same_bits(result, expected(moe.config, moe.rank, tokens, self.gone))
            digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
        return {"wrong": wrong, "digest": digest.hexdigest()}

    async def do_until_missing(self) -> dict[str, Any]:
        """Step until a rank is missing; return who."""
        seed = 0
        while True:
            try:
                await self.do_steps(seed, 1)
            except MissingRankError as error:
                return {"ranks": error.ranks, "lost": error.lost}
            seed += 1

    async def do_exclude(self, ranks: list[int]) -> dict[str, Any]:
        await self.moe.exclude(ranks)
        self.gone = tuple(ranks)
        return {"present": self.moe.present}


async def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)
    torch.set_num_threads(1)
    lines = trio.wrap_file(os.fdopen(0, "r"))
    rank = Rank()
    async with rank.stack:
        while True:
            command = json.loads(await lines.readline())
            name = command.pop("do")
            if name == "close":
                break
            try:
                answer(await getattr(rank, f"do_{name}")(**command))
            except Exception as error:
                answer({"error": type(error).__name__, "text": str(error)})
    answer({"closed": True})


trio.run(main)

"""One process of a training by FSDP2 whose weights it serves itself: a trainer rank and a receiver on the same GPU.

`python fsdp_rank.py DEVICE VERSIONS`, with torchrun's variables: over NCCL and cuda rails for "cuda", over gloo and the
local rail for "cpu". Prints a line for each version that serves and is what whole tensors, quantised by torch, say.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trio
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import asyncfabric as af
from asyncfabric.weights import Held, Mesh, Move, Plan, Shard, alone, fused, held_by, place, plan_weights
from asyncfabric.weights.tensors import arrays_of, holdings
from asyncfabric.weights.update import COORDINATOR, open_coordinator, open_publisher, open_replica, trainer_name
from asyncfabric_services.bench.weights_post import FabricPost
from asyncfabric_services.rollout.usual import quantise

IN, HIDDEN, OUT = 256, 512, 385
"""The last does not divide by ranks or blocks: ranks hold unequal parts, and blocks that both have a part of."""


class Block(nn.Module):
    """As the middle of a layer: two matrices that replicas fuse, one that they cut in columns, one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(IN, HIDDEN, bias=False)
        self.up = nn.Linear(IN, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, OUT, bias=False)
        self.norm = nn.Parameter(torch.ones(OUT))

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.down(nn.functional.silu(self.gate(states)) * self.up(states)) * self.norm
        return found


def plan_of(held: Mapping[str, Held], ranks: int) -> Plan:
    """Return the plan: float8 into a replica of as many ranks, the vector as it is."""
    replica = Mesh.of({"tp": ranks})
    rows = place((HIDDEN, IN), replica, {"tp": Shard(0)})
    gate_up = fused([rows, rows])
    moves = [
        Move(name, held[name].dtype, held[name].placement, "gate_up.weight", "float8_e4m3fn", target, 128)
        for name, target in zip(("gate.weight", "up.weight"), gate_up, strict=True)
    ]
    columns = alone(place((OUT, HIDDEN), replica, {"tp": Shard(1)}))
    down, norm = held["down.weight"], held["norm"]
    moves.append(Move("down.weight", down.dtype, down.placement, "down.weight", "float8_e4m3fn", columns, 128))
    moves.append(Move("norm", norm.dtype, norm.placement, "norm", "bfloat16", alone(place((OUT,), replica, {}))))
    return plan_weights(moves, trainers=ranks, receivers=ranks, replicas=["a"])


def expected(whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Return what a rank of the replica serves, from whole tensors on the CPU."""
    gate_up = torch.cat([whole[name].chunk(ranks)[rank] for name in ("gate.weight", "up.weight")])
    found = {"norm": whole["norm"]}
    for name, matrix in (("gate_up.weight", gate_up), ("down.weight", whole["down.weight"].chunk(ranks, 1)[rank])):
        found[name], found[name + "_scale_inv"] = quantise(matrix)
    return found


async def train(device: str, versions: int) -> None:
    """Train, publish and check, as one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = f"cuda:{rank}" if device == "cuda" else "cpu"
    torch.manual_seed(7)
    model = Block().to(here, torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh(device, (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, holdings(state, rank))
    plan = plan_of(held_by(told), ranks)
    mine = [trainer_name(rank), f"a/{rank}", *([COORDINATOR] if rank == 0 else [])]
    config = af.FabricConfig(rails=(here if device == "cuda" else "local",), peer_deadline_host=30.0)
    async with AsyncExitStack() as stack:
        fabrics = {name: await stack.enter_async_context(af.open_fabric(config)) for name in mine}
        known: list[Any] = [None] * ranks
        dist.all_gather_object(known, {name: bytes(fabric.address) for name, fabric in fabrics.items()})
        addresses = {name: af.FabricAddress.from_bytes(each) for part in known for name, each in part.items()}
        posts = {name: FabricPost(fabric, name, addresses) for name, fabric in fabrics.items()}
        if rank == 0:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
            coordinator = await stack.enter_async_context(open_coordinator(posts[COORDINATOR], plan, log))
        replica = await stack.enter_async_context(
            open_replica(fabrics[f"a/{rank}"], posts[f"a/{rank}"], plan, "a", rank, device=here)
        )
        shards = arrays_of(state, rank)
        publisher = await stack.enter_async_context(
            open_publisher(fabrics[trainer_name(rank)], posts[trainer_name(rank)], plan, rank, shards)
        )
        for version in range(1, versions + 1):
            loss = model(torch.randn(32, IN, device=here, dtype=torch.bfloat16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            async with trio.open_nursery() as nursery:
                if rank == 0:
                    await coordinator.wait_receivers([f"a/{each}" for each in range(ranks)])
                    nursery.start_soon(coordinator.update, version)
                await publisher.publish(version)
            await replica.wait_version(version)
            assert replica.step_boundary() == version
            whole = {name: parameter.full_tensor().cpu() for name, parameter in state.items()}
            for name, wanted in expected(whole, rank, ranks).items():
                served = torch.as_tensor(replica.tensors()[name]).cpu().view(-1)
                assert torch.equal(served, wanted.contiguous().view(torch.uint8).view(-1)), (version, name)
            parts = sorted(tuple(one.to_local().shape) for one in state.values())
            print(f"rank {rank}: version {version} is right, {parts}", flush=True)
        dist.barrier()


def main(device: str, versions: int) -> None:
    """Join the process group and train."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        trio.run(train, device, versions)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

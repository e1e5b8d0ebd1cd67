"""One process of a training by FSDP2 whose weights it serves itself: a trainer rank and a receiver on the same GPU.

`python fsdp_rank.py block|causal|block+causal cpu|cuda VERSIONS`, with torchrun's variables: over NCCL and cuda rails
for "cuda", over gloo and the local rail for "cpu". "causal" is what services train. Prints a line for each version that
serves and is what whole tensors, quantised by torch, state.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import trio
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import asyncfabric as af
from asyncfabric.control import FabricChannels
from asyncfabric.weights import (
    Held,
    Mesh,
    Move,
    Plan,
    ReplicaLayout,
    Shard,
    alone,
    card_of,
    causal_moves,
    fused,
    held_by,
    place,
    plan_weights,
)
from asyncfabric.weights.tensors import arrays_of, holdings
from asyncfabric.weights.update import (
    COORDINATOR,
    WEIGHT_CODEC,
    open_coordinator,
    open_publisher,
    open_replica,
    trainer_name,
)
from asyncfabric_services.rollout.usual import load_usual, quantise
from asyncfabric_services.trainer.training import Training
from asyncfabric_services.trainer.world import join_world, leave_world

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


class BlockTraining:
    """The block and its optimizer, as services know a training."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(7)
        self._device = device
        self._model = Block().to(device, torch.bfloat16)
        fully_shard(self._model, mesh=init_device_mesh(torch.device(device).type, (dist.get_world_size(),)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.01)

    def state(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def holdings(self) -> list[Any]:
        return holdings(self.state(), dist.get_rank())

    def arrays(self) -> Mapping[str, Any]:
        return arrays_of(self.state(), dist.get_rank())

    def step(self) -> None:
        loss = self._model(torch.randn(32, IN, device=self._device, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def whole_state(self) -> dict[str, Tensor]:
        return {name: cast("DTensor", parameter).full_tensor().cpu() for name, parameter in self.state().items()}

    def plan(self, held: Mapping[str, Held], ranks: int) -> Plan:
        return plan_of(held, ranks)

    def served(self, whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
        """Return what a rank of the replica serves, from whole tensors on the CPU."""
        gate_up = torch.cat([whole[name].chunk(ranks)[rank] for name in ("gate.weight", "up.weight")])
        found = {"norm": whole["norm"]}
        for name, matrix in (("gate_up.weight", gate_up), ("down.weight", whole["down.weight"].chunk(ranks, 1)[rank])):
            found[name], found[name + "_scale_inv"] = quantise(matrix)
        return found


class CausalTraining(Training):
    """A training of the services: its plan, and what the usual way of loading gives."""

    def __init__(self, device: str) -> None:
        from asyncfabric_services.runner.model import ModelChoice, load_model

        choice = ModelChoice(path=None, layers=2, hidden=256, query_heads=4, kv_heads=4, max_tokens=256, seed=0)
        model = load_model(choice, page_tokens=1).model.to(torch.float32)
        self.config = model.config
        super().__init__(model, device=device)

    def plan(self, held: Mapping[str, Held], ranks: int) -> Plan:
        self.layout = ReplicaLayout(ranks=ranks, tp=ranks, fp8=True)
        moves = causal_moves(held, card_of(self.config), self.layout)
        return plan_weights(moves, trainers=ranks, receivers=ranks, replicas=["a"])

    def served(self, whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
        return load_usual(whole, card_of(self.config), self.layout)[rank]


async def train(kind: str, here: str, versions: int) -> None:
    """Train, publish and check, as one rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training: Any = BlockTraining(here) if kind == "block" else CausalTraining(here)
    reported: list[Any] = [None] * ranks
    dist.all_gather_object(reported, training.holdings())
    plan = training.plan(held_by(reported), ranks)
    mine = [trainer_name(rank), f"a/{rank}", *([COORDINATOR] if rank == 0 else [])]
    config = af.FabricConfig(rails=("local" if here == "cpu" else here,), peer_deadline_host=30.0)
    async with AsyncExitStack() as stack:
        fabrics = {name: await stack.enter_async_context(af.open_fabric(config)) for name in mine}
        known: list[Any] = [None] * ranks
        dist.all_gather_object(known, {name: bytes(fabric.address) for name, fabric in fabrics.items()})
        addresses = {name: af.FabricAddress.from_bytes(each) for part in known for name, each in part.items()}
        channels = {
            name: FabricChannels(fabric, WEIGHT_CODEC, addresses).open(name) for name, fabric in fabrics.items()
        }
        if rank == 0:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
            coordinator = await stack.enter_async_context(open_coordinator(channels[COORDINATOR], plan, log))
        replica = await stack.enter_async_context(
            open_replica(fabrics[f"a/{rank}"], channels[f"a/{rank}"], plan, "a", rank, device=here)
        )
        shards = training.arrays()
        publisher = await stack.enter_async_context(
            open_publisher(fabrics[trainer_name(rank)], channels[trainer_name(rank)], plan, rank, shards)
        )
        for version in range(1, versions + 1):
            training.step()
            async with trio.open_nursery() as nursery:
                if rank == 0:
                    await coordinator.wait_receivers([f"a/{each}" for each in range(ranks)])
                    nursery.start_soon(coordinator.update, version)
                await publisher.publish(version)
            await replica.wait_version(version)
            assert replica.step_boundary() == version
            for name, wanted in training.served(training.whole_state(), rank, ranks).items():
                served = torch.as_tensor(replica.tensors()[name]).cpu().view(-1)
                assert torch.equal(served, wanted.contiguous().view(torch.uint8).view(-1)), (version, name)
            parts = sorted(tuple(one.shape) for one in shards.values())
            print(f"rank {rank}: version {version} is right, {parts}", flush=True)
        dist.barrier()


def main(kinds: str, device: Literal["cpu", "cuda"], versions: int) -> None:
    """Join the process group and train one after the other."""
    _, _, here = join_world("cpu" if device == "cpu" else f"cuda:{os.environ['RANK']}")
    try:
        for kind in kinds.split("+"):
            trio.run(train, kind, here, versions)
    finally:
        leave_world()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))  # type: ignore[arg-type]

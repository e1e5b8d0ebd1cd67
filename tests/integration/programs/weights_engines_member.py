"""A trainer's rank, or an engine with all its ranks, of a session whose engines differ. Commands come as JSON lines.

`weights_engines_member.py trainer RANK RANKS PORT FOLDER` or `... engine LAYOUT NAME PORT FOLDER`. PORT is that of the
store where they meet; 0 serves it. A trainer shards its matrices over gloo as DTensors; rank 0 writes each version
whole into FOLDER. An engine writes the tensors of all its ranks once it has a version that it is asked for.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trio
from safetensors.torch import save_file
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from asyncfabric import FabricConfig
from asyncfabric.errors import BrokenError
from asyncfabric.weights import Rule
from asyncfabric.weights.blocking import StoreJoin, open_sender
from asyncfabric.weights.sessions import WeightReceiver, open_receiver

LOCAL = FabricConfig(rails=("local",))
SHAPES = {"gate": (256, 384), "up": (256, 384), "down": (384, 256), "norm": (384,)}
FUSED = (Rule(source="gate", tensor="gate_up", part=0), Rule(source="up", tensor="gate_up", part=1), Rule(source=".*"))
LAYOUTS = {"two": 2, "four": 4, "eight-bit": 1, "wrong-shape": 1, "wrong-dtype": 1, "wrong-rule": 1}
BOUNDARY_S = 5.0


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def train(rank: int, ranks: int, store: TCPStore, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    state = {name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for name, shape in SHAPES.items()}
    with open_sender(state, StoreJoin(store), config=LOCAL, boundary_s=BOUNDARY_S) as sender:
        answer(ready=rank)
        for line in sys.stdin:
            version = json.loads(line)["version"]
            torch.manual_seed(version)
            with torch.no_grad():
                for name, tensor in state.items():
                    tensor.copy_(distribute_tensor(torch.randn(SHAPES[name]), mesh, [Shard(0)]))
            whole = {name: tensor.full_tensor() for name, tensor in state.items()}
            if rank == 0:
                save_file(whole, folder / f"version-{version}.safetensors")
            try:
                report = sender.publish(version)
                assert report is not None
                answer(published=version, receivers=sorted(report.receivers), failures=report.failures)
            except BrokenError as error:
                answer(error=str(error))


def tensors_of(layout: str) -> dict[str, torch.Tensor]:
    ranks = LAYOUTS[layout]
    shapes = {"gate_up": (512 // ranks, 384), "down": (384, 256 // ranks), "norm": (384,)}
    if layout == "wrong-shape":
        shapes["norm"] = (383,)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    if layout == "eight-bit":
        tensors["down"] = torch.zeros(shapes["down"], dtype=torch.float8_e4m3fn)
        tensors["down_scale_inv"] = torch.zeros(3, 2)
    if layout == "wrong-dtype":
        tensors["norm"] = torch.zeros(384, dtype=torch.int32)
    return tensors


async def serve(layout: str, name: str, store: TCPStore, folder: Path) -> None:
    ranks = LAYOUTS[layout]
    tensors = [tensors_of(layout) for _ in range(ranks)]
    places = [{each: tensor.data_ptr() for each, tensor in one.items()} for one in tensors]
    rules = FUSED[:1] if layout == "wrong-rule" else FUSED
    receivers: dict[int, WeightReceiver] = {}
    async with AsyncExitStack() as stack:

        async def join(rank: int) -> None:
            opened = open_receiver(
                tensors[rank], StoreJoin(store), name=name, rank=rank, ranks=ranks, rules=rules, config=LOCAL
            )
            async with opened as receivers[rank]:
                if len(receivers) == ranks:
                    answer(ready=name)
                await trio.sleep_forever()

        nursery = await stack.enter_async_context(trio.open_nursery())
        for rank in range(ranks):
            nursery.start_soon(join, rank)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            version = json.loads(line)["version"]
            for rank, receiver in sorted(receivers.items()):
                while receiver.version < version:
                    await receiver.wait()
                    receiver.apply()
                save_file(tensors[rank], folder / f"{name}-{rank}.safetensors")
            assert places == [{each: tensor.data_ptr() for each, tensor in one.items()} for one in tensors]
            answer(applied=[receivers[rank].version for rank in range(ranks)])


def main() -> None:
    role, first, second, port, folder = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5])
    store = TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)
    if port == 0:
        answer(port=store.port)
    try:
        if role == "trainer":
            train(int(first), int(second), store, folder)
        else:
            trio.run(serve, first, second, store, folder)
    except* ValueError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        answer(refused=str(error))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads wait for the other ranks


if __name__ == "__main__":
    main()

"""A trainer's rank, or an engine, that exchange versions in three calls; each ends by itself.

`python three_calls_member.py trainer|engine RANK TRAINERS VERSIONS PORT DEVICE RAIL SHADOW`. PORT is of the store where
they meet; 0 serves it, and prints its port first. What a version is follows from its number, so the engine knows what
has to be in its tensors. On "cuda:N" it captures a graph over them before the first version, and replays it after each.
RAIL "auto" leaves the choice to the fabric.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from asyncfabric import FabricConfig
from asyncfabric.weights import Rule
from asyncfabric.weights.blocking import StoreJoin, open_receiver, open_sender
from asyncfabric.weights.sessions.stores import connect_store, serve_store
from asyncfabric_services.rollout.usual import quantise

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (301, 256),
    "gate": (386, 256),
    "up": (386, 256),
    "down": (256, 386),
    "turned": (96, 200),
}
SHAPES |= {"norm": (257,), "odd": (257,), "wide": (4096, 2048)}
ROOM = 320  # rows of the engine's vocabulary
RULES = (
    Rule(source="gate", tensor="gate_up", part=0),
    Rule(source="up", tensor="gate_up", part=1),
    Rule(source="turned", transposed=True),
    Rule(source=".*"),
)


def whole(name: str, version: int) -> Tensor:
    """Return a parameter of a version, on the CPU."""
    generator = torch.Generator().manual_seed(100 * version + sorted(SHAPES).index(name))
    values = torch.randn(SHAPES[name], generator=generator)
    if name in ("down", "norm"):
        return values
    found = values.bfloat16()
    if name == "odd":
        found.view(torch.int16)[7] = 0x7F81  # a NaN whose bits change in arithmetic
    return found


def train(rank: int, ranks: int, versions: int, store: Any, device: str, config: FabricConfig | None) -> None:
    """Publish all versions."""
    group = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=group, rank=rank, world_size=ranks)
    mesh = init_device_mesh(torch.device(device).type, (ranks,))

    def sharded(name: str, version: int) -> Any:
        return distribute_tensor(whole(name, version).to(device), mesh, [Shard(0)], src_data_rank=None)

    state = {name: sharded(name, 0) for name in SHAPES}
    with open_sender(state, StoreJoin(store), config=config) as sender:
        for version in range(1, versions + 1):
            for name, tensor in state.items():
                tensor.to_local().copy_(sharded(name, version).to_local())
            report = sender.publish(version)
            assert report is not None and report.receivers, "nobody has it"
            print(f"trainer {rank}: version {version} is published", flush=True)
        store.wait(["ended"])


def serve(versions: int, store: Any, device: str, config: FabricConfig | None, shadow: str) -> None:
    """Apply all versions."""
    place = torch.device(device)
    untouched: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    tensors = {
        "embed": torch.full((ROOM, 256), -1.0, **untouched),
        "gate_up": torch.zeros(772, 256, **untouched),
        "down": torch.zeros(256, 386, device=device).to(torch.float8_e4m3fn),
        "down_scale_inv": torch.zeros(2, 4, device=device),
        "turned": torch.zeros(200, 96, **untouched),
        "norm": torch.zeros(257, device=device),
        "odd": torch.zeros(257, **untouched),
        "wide": torch.zeros(4096, 2048, **untouched),
    }
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    stream = torch.cuda.Stream(place) if place.type == "cuda" else None  # type: ignore[no-untyped-call]
    seen = {name: tensor.float().clone() for name, tensor in tensors.items()}
    graph = torch.cuda.CUDAGraph() if stream is not None else None
    if graph is not None:
        torch.cuda.synchronize(place)
        with torch.cuda.graph(graph):
            for name, tensor in tensors.items():
                seen[name].copy_(tensor.float() * 2)
    with open_receiver(tensors, StoreJoin(store), rules=RULES, config=config, shadow=shadow) as receiver:
        print("engine: joined", flush=True)
        for version in range(1, versions + 1):
            while receiver.poll() < version:
                receiver.wait(60)
            if stream is None or version % 2:
                assert receiver.apply() == version
            else:
                assert receiver.apply(stream) == version
            if graph is not None:
                with torch.cuda.stream(stream):
                    graph.replay()
                torch.cuda.synchronize(place)
            check(tensors, version)
            if graph is not None:
                for name, tensor in tensors.items():
                    same = torch.equal(seen[name].view(torch.int32), (tensor.float() * 2).view(torch.int32))
                    assert same, f"the graph read another {name}"
            assert places == {name: tensor.data_ptr() for name, tensor in tensors.items()}
            print(f"engine: version {version} is right", flush=True)
    store.set("ended", "")


def check(tensors: dict[str, Tensor], version: int) -> None:
    """Compare with what a loader makes of whole tensors."""
    down, scales = quantise(whole("down", version))
    wanted = {
        "embed": torch.cat([whole("embed", version), torch.full((ROOM - 301, 256), -1.0, dtype=torch.bfloat16)]),
        "gate_up": torch.cat([whole("gate", version), whole("up", version)]),
        "down": down,
        "down_scale_inv": scales,
        "turned": whole("turned", version).T.contiguous(),
        "norm": whole("norm", version),
        "odd": whole("odd", version),
        "wide": whole("wide", version),
    }
    assert wanted.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.cpu().view(torch.uint8), wanted[name].view(torch.uint8)), (version, name)


def main() -> None:
    """Take a part."""
    role, rank, ranks, versions, port = sys.argv[1], *map(int, sys.argv[2:6])
    device, rail, shadow = sys.argv[6:]
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # a rail of a GPU that is not used yet does not open by itself
    config = None if rail == "auto" else FabricConfig(rails=(rail,))
    if port:
        store = connect_store("127.0.0.1", port, 60)
    else:
        store, port = serve_store("127.0.0.1", 0, 60)
        print(port, flush=True)
    if role == "trainer":
        train(rank, ranks, versions, store, device, config)
    else:
        serve(versions, store, device, config, shadow)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads wait for the other ranks


if __name__ == "__main__":
    main()

"""A training that learns from a vLLM engine on its GPU: ranks of FSDP2, a reward by a rule, versions every few steps.

Usage: python tests/gpu/programs/vllm_learning.py [--ranks 2] [--versions 20] [--shadow device|host] [--eager]
Wants vLLM 0.26 and its packages; no network. Prints the mean reward with each version, and a line of JSON. Each version
is kept as a checkpoint, too: in the end the engine loads them by vLLM's own loader, and parameters and logits have to
be, bit for bit, what they were when the version had come from the training. Ends with 1 if one was not, or nothing was
learned. Ranks that share a GPU move their shards over host memory, since NCCL refuses that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from vllm_learning_engine import EACH, PROMPT_TOKENS, VOCABULARY, answer_calls
from vllm_weights import RemoteEngine, free_port
from vllm_weights_engine import prepare

from asyncfabric_services.demo.rl.task import advantages
from asyncfabric_services.demo.rl.trainer import loss_of

STEPS_OF_VERSION, LEARNING_RATE = 2, 3e-4
REWARDED = VOCABULARY // 4
LEAST_GAIN = 0.2


class HostGather:
    """FSDP2's all-gather by gloo."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Gather."""
        found = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        parts = list(found.view(dist.get_world_size(group), -1).unbind())
        dist.all_gather(parts, input_tensor.flatten().cpu(), group=group)
        output_tensor.copy_(found)


class HostScatter(HostGather):
    """FSDP2's reduce-scatter by gloo."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Sum, or average, and scatter."""
        whole = input_tensor.cpu()
        dist.all_reduce(whole, group=group)
        ranks = dist.get_world_size(group)
        mine = whole.view(ranks, -1)[dist.get_rank(group)].view(output_tensor.shape)
        output_tensor.copy_(mine / ranks if op == dist.ReduceOp.AVG else mine)


def model_config() -> Any:
    """Return the configuration of a Llama of 90 million parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def sharded_model(ranks: int) -> Any:
    """Return the model in float32, the same at every rank, and sharded over all of them."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(model_config()).float().cuda()
    mesh = init_device_mesh("cuda", (ranks,))
    parts = [fully_shard(layer, mesh=mesh) for layer in model.model.layers]
    for part in (*parts, fully_shard(model, mesh=mesh)):
        part.set_custom_all_gather(HostGather())
        part.set_custom_reduce_scatter(HostScatter())
    return model


def whole_state(model: Any, ranks: int) -> dict[str, Tensor]:
    """Return all parameters, whole and in bfloat16, in host memory."""
    found: dict[str, Tensor] = {}
    for name, each in model.named_parameters():
        shards: list[Any] = [None] * ranks
        dist.all_gather_object(shards, each.detach().to_local().bfloat16().cpu())
        found[name] = torch.cat(shards)
    return found


def train(rank: int, options: argparse.Namespace, port: int, folder: Path) -> None:
    """Be one rank; rank 0 calls the engine, shows the curve, compares, and writes what came of it into the folder."""
    prepare()
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from asyncfabric.integrations.vllm_weights import TrainerInit, register

    ranks = options.ranks
    torch.cuda.set_device(0)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=where, rank=rank, world_size=ranks)
    register()
    model = sharded_model(ranks)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    first = whole_state(model, ranks)
    engine: Any = None
    if not rank:
        model_config().save_pretrained(folder)
        save_file(first, folder / "model.safetensors", metadata={"format": "pt"})
        engine = RemoteEngine(answer_calls, str(folder), not options.eager)
    dist.barrier()
    sending: Any = WeightTransferTrainerFactory.trainer_init(
        "asyncfabric",
        None,
        TrainerInit(rank=rank, ranks=ranks, shadow=options.shadow),
        client=engine,
        source=ModuleSource(model),
    )
    curve: list[float] = []
    served: dict[int, Any] = {}
    sent_ms: list[float] = []
    for version in range(1, options.versions + 1):
        state = whole_state(model, ranks)
        begun = time.monotonic()
        sending.send_weights()
        sent_ms.append(1e3 * (time.monotonic() - begun))
        if not rank:
            save_file(state, folder / f"version-{version}.safetensors")
            served[version] = engine.call("digests")
        means = []
        for step in range(STEPS_OF_VERSION):
            given: list[Any] = [None]
            if not rank:
                tokens = torch.tensor(engine.call("generate", version * STEPS_OF_VERSION + step))
                given = [tokens]
            dist.broadcast_object_list(given)
            tokens = given[0]
            reward = (tokens[:, PROMPT_TOKENS:] < REWARDED).float().mean(dim=1)
            means.append(float(reward.mean()))
            mine, advantage = (one.chunk(ranks)[rank].cuda() for one in (tokens, advantages(reward, EACH)))
            loss: Any = loss_of(model, mine, advantage, PROMPT_TOKENS)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        curve.append(statistics.mean(means))
        if not rank:
            print(f"version {version:3}  reward {curve[-1]:.3f}  {'#' * round(40 * curve[-1])}", flush=True)
    if not rank:
        usual = {version: engine.call("usual", str(folder / f"version-{version}.safetensors")) for version in served}
        wrong = [version for version in served if served[version] != usual[version]]
        quarter = max(1, len(curve) // 4)
        gain = statistics.mean(curve[-quarter:]) - statistics.mean(curve[:quarter])
        row = {
            "program": "vllm learning",
            "card": torch.cuda.get_device_name(),
            "parameters": sum(each.numel() for each in first.values()),
            "ranks": ranks,
            "shadow": options.shadow,
            "graphs": not options.eager,
            "compared": len(served),
            "different_digests": len(set(map(str, served.values()))),
            "wrong": wrong,
            "send_ms": round(statistics.median(sent_ms), 1),
            "rewards": [round(one, 3) for one in curve],
            "gain": round(gain, 3),
        }
        print(json.dumps(row), flush=True)
        fine = not wrong and row["different_digests"] == len(served) and gain >= LEAST_GAIN
        (folder / "status").write_text("0" if fine else "1")
        engine.process.kill()
    dist.barrier()
    os._exit(0)  # gloo's threads wait for the other ranks


def main() -> int:
    """Start the ranks; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--shadow", default="device", choices=["device", "host"])
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    prepare()
    folder = Path(mkdtemp(prefix="asyncfabric-learning-"))
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.spawn(train, (options, free_port(), folder), nprocs=options.ranks)
    status = folder / "status"
    return int(status.read_text()) if status.exists() else 1


if __name__ == "__main__":
    sys.exit(main())

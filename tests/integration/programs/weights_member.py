"""A trainer's or an engine's rank that uses weights in three calls.

`weights_member.py ROLE RANK RANKS PORT FOLDER NAME SHADOW`. PORT is that of the store where they meet; 0 serves it. A
trainer is FSDP2 over gloo, and NAME is its meeting; rank 0 writes each version whole into FOLDER. An engine has the
fused tensors of one rank of tensor parallelism, with a vocabulary that is rounded up, and writes them after each
`apply`. Commands come as JSON lines; each is answered by one, apart from `die`: kill -9 in the next update.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import TCPStore
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from asyncfabric import BrokenError, ClosedError, FabricConfig
from asyncfabric.weights import causal_rules
from asyncfabric.weights.blocking import BlockingReceiver, StoreJoin, open_receiver, open_sender
from asyncfabric.weights.receiver.versions import Versions
from asyncfabric.weights.sender.pipeline import WeightSending

HEADS, KV_HEADS, VOCAB, HIDDEN, WIDE = 4, 2, 100, 32, 64
LOCAL = FabricConfig(rails=("local",))


def commands() -> Any:
    for line in sys.stdin:
        yield json.loads(line)


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def killed(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, ranks: int, store: TCPStore, folder: Path, meeting: str) -> None:
    dist.init_process_group("gloo", store=dist.PrefixStore(f"of {meeting}", store), rank=rank, world_size=ranks)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with open_sender(model, StoreJoin(store, meeting), config=LOCAL) as sender:
        answer(ready=rank)
        for command in commands():
            if command["do"] == "end":
                break
            if command["do"] == "die":  # before it writes anything, or once all is written and nothing is reported
                setattr(WeightSending, command["at"], killed)
                continue
            batch = torch.randint(VOCAB, (2, 8))
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = {name: each.detach().full_tensor().bfloat16() for name, each in model.named_parameters()}
            if rank == 0:
                save_file(whole, folder / f"version-{command['version']}.safetensors")
            try:
                sender.publish(command["version"], wait=command.get("wait", True))
                if not command.get("wait", True):
                    sender.wait()
                answer(published=command["version"])
            except Exception as error:
                answer(error=f"{type(error).__name__}: {error}")
    answer(left=rank)


def serve(rank: int, ranks: int, store: TCPStore, folder: Path, name: str, shadow: str) -> None:
    root, qkv = "model.layers.", (HIDDEN + 2 * HIDDEN * KV_HEADS // HEADS) // ranks
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (HIDDEN,)}
    for each in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[each] = (128 // ranks, HIDDEN)
    for layer in range(2):
        shapes |= {
            f"{root}{layer}.self_attn.qkv_proj.weight": (qkv, HIDDEN),
            f"{root}{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN // ranks),
            f"{root}{layer}.mlp.gate_up_proj.weight": (2 * WIDE // ranks, HIDDEN),
            f"{root}{layer}.mlp.down_proj.weight": (HIDDEN, WIDE // ranks),
            f"{root}{layer}.input_layernorm.weight": (HIDDEN,),
            f"{root}{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }
    if name.startswith("odd"):
        shapes["model.norm.weight"] = (HIDDEN - 1,)
    tensors = {each: torch.full(shape, -1.0, dtype=torch.bfloat16) for each, shape in shapes.items()}
    meeting = "weights"
    while meeting:
        with open_receiver(
            tensors, StoreJoin(store, meeting), name=name, rank=rank, ranks=ranks, rules=causal_rules(HEADS, KV_HEADS),
            config=LOCAL, shadow=shadow,
        ) as receiver:  # fmt: skip
            answer(ready=rank)
            meeting = obey(receiver, tensors, folder / f"{name}-{rank}")
    answer(left=rank)


def obey(receiver: BlockingReceiver, tensors: dict[str, torch.Tensor], path: Path) -> str:
    """Do what is wanted; return the meeting to go to then, empty for none."""
    places = {each: tensor.data_ptr() for each, tensor in tensors.items()}
    for command in commands():
        match command["do"]:
            case "end":
                break
            case "meet":
                return str(command["meeting"])
            case "die":
                Versions._take_written = killed  # type: ignore[assignment, method-assign]
            case "look":
                digest = hashlib.sha256(b"".join(bytes(each.view(torch.uint8).numpy()) for each in tensors.values()))
                answer(version=receiver.version, coming=receiver.poll(), digest=digest.hexdigest())
            case _:
                try:
                    while receiver.version < command["version"]:
                        receiver.wait()
                        receiver.apply()
                except (BrokenError, ClosedError) as error:
                    answer(error=str(error), version=receiver.version)
                    continue
                save_file(tensors, f"{path}-{receiver.version}.safetensors")
                moved = [each for each, tensor in tensors.items() if tensor.data_ptr() != places[each]]
                answer(applied=receiver.version, moved=moved)
    return ""


def main() -> None:
    role, rank, ranks, port, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    store = TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)
    if port == 0:
        answer(port=store.port)
    try:
        if role == "trainer":
            train(rank, ranks, store, Path(folder), sys.argv[6])
        else:
            serve(rank, ranks, store, Path(folder), sys.argv[6], sys.argv[7])
    except ValueError as error:
        answer(refused=str(error))
        sys.stdin.read()  # until the test ends: others may still need the store
    sys.stdout.flush()
    os._exit(0)  # gloo's threads wait for the other ranks


if __name__ == "__main__":
    main()

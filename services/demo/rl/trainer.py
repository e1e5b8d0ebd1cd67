"""A rank of the training of the demo: FSDP2 over gloo, policy gradients, and the two calls that publish. Blocking."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from asyncfabric import FabricConfig
from asyncfabric.weights.blocking import StoreJoin, open_sender
from asyncfabric.weights.sessions.stores import connect_store, serve_store
from asyncfabric_services.demo.rl.task import PROMPT_TOKENS, model_config
from asyncfabric_services.trainer.checkpoints import save_version

RANKS = 2
LEARNING_RATE = 3e-3
DEADLINE_S = 120.0


def sharded_model() -> Any:
    """Return the model, the same at every rank and sharded over all of them."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(model_config())
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def loss_of(model: Any, tokens: Tensor, advantage: Tensor, prompt_tokens: int = PROMPT_TOKENS) -> Tensor:
    """Return the loss of a policy gradient: answers that were better than others of their group become likelier."""
    logits = model(input_ids=tokens).logits[:, prompt_tokens - 1 : -1]
    chosen = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, prompt_tokens:, None])[..., 0]
    return -(advantage[:, None] * chosen).mean()


def train(pipe: Connection, rank: int, port: int, rail: str, threads: int, folder: Path) -> None:
    """Take ("step", tokens, advantages) and ("publish", version); answer each when it is done.

    Rank 0 serves the store, whose port it sends first, and keeps each version as a checkpoint.
    """
    torch.set_num_threads(threads)
    if rank:
        store = connect_store("127.0.0.1", port, DEADLINE_S)
    else:
        store, port = serve_store("127.0.0.1", 0, DEADLINE_S)
        pipe.send(port)
    group: Any = dist
    group.init_process_group("gloo", store=group.PrefixStore("group", store), rank=rank, world_size=RANKS)
    model = sharded_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    with open_sender(model, StoreJoin(store), config=FabricConfig(rails=(rail,))) as sender:
        while True:
            try:
                what, *values = pipe.recv()
            except EOFError:
                return
            if what == "end":
                break
            if what == "publish":
                state = {name: each.detach().full_tensor() for name, each in model.named_parameters()}
                if not rank:
                    save_version(folder, values[0], state)
                sender.publish(values[0])
                pipe.send(values[0])
                continue
            tokens, advantage = (one.chunk(RANKS)[rank] for one in values)
            loss: Any = loss_of(model, tokens, advantage)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pipe.send("stepped")
    pipe.send("left")
    pipe.recv()  # gloo's threads wait for the other ranks: the parent ends this process

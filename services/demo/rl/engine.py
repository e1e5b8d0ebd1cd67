"""The engine of the demo: a process that generates with the fused tensors that versions come into. Blocking."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from asyncfabric import FabricConfig
from asyncfabric.weights import ReplicaLayout, causal_rules
from asyncfabric.weights.blocking import StoreJoin, open_receiver
from asyncfabric.weights.sessions.stores import connect_store
from asyncfabric_services.demo.rl.task import NEW_TOKENS, model_config, prompts
from asyncfabric_services.rollout.fingerprint import bytes_digest, logits_digest
from asyncfabric_services.rollout.fused_model import FusedModel
from asyncfabric_services.rollout.usual import load_usual

DEADLINE_S = 120.0


def empty_tensors(config: Any, layout: ReplicaLayout) -> dict[str, Tensor]:
    """Return the tensors of an engine that has loaded nothing, by its own names."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        shapes = {name: one.shape for name, one in LlamaForCausalLM(config).named_parameters()}
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return load_usual(zeros, FusedModel(config, layout).card, layout)[0]


def serve(pipe: Connection, port: int, rail: str, threads: int) -> None:
    """Answer each ("version", n) with digests of what then serves, and each ("generate", seed) with token ids."""
    torch.set_num_threads(threads)
    config, layout = model_config(), ReplicaLayout()
    model, own = FusedModel(config, layout), empty_tensors(config, layout)
    rules = causal_rules(config.num_attention_heads, config.num_key_value_heads)
    join = StoreJoin(connect_store("127.0.0.1", port, DEADLINE_S))
    with open_receiver(own, join, rules=rules, config=FabricConfig(rails=(rail,))) as receiver:
        while True:
            try:
                what, number = pipe.recv()
            except EOFError:
                return
            if what == "end":
                return
            if what == "version":
                while receiver.version < number:
                    receiver.wait(DEADLINE_S)
                    receiver.apply()
                pipe.send((bytes_digest([own]), logits_digest(model, [own])))
            else:
                pipe.send(generated(model, own, number))


def generated(model: FusedModel, own: dict[str, Tensor], seed: int) -> Tensor:
    """Return prompts with answers that are drawn from the model, (rows, tokens) int64."""
    tokens, dice = prompts(seed), torch.Generator().manual_seed(seed)
    for _ in range(NEW_TOKENS):
        chance = torch.softmax(model.logits([own], tokens)[:, -1], dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(chance, 1, generator=dice)], dim=1)
    return tokens

"""Models, what trainer ranks hold of them, and the comparison of a filled replica with one that was loaded as usual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import asyncfabric as af
from asyncfabric.control import LocalChannels
from asyncfabric.weights import Plan, ReplicaLayout, ReplicaMemory, execute, plan_weights
from asyncfabric.weights.plan.causal import card_of, causal_moves
from asyncfabric.weights.plan.holdings import Holding, held_by, local_tensors
from asyncfabric.weights.plan.target import Move
from asyncfabric.weights.tensors import tensor_over
from asyncfabric.weights.update import (
    COORDINATOR,
    WEIGHT_CODEC,
    WeightPublisher,
    open_coordinator,
    open_publisher,
    open_replica,
    receiver_name,
    trainer_name,
)
from asyncfabric_services.rollout.fused_model import FusedModel
from asyncfabric_services.rollout.usual import load_usual

torch.set_num_threads(1)  # more would wait for each other on a busy machine
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
}
PROMPTS = torch.arange(4 * 12).reshape(4, 12) * 37 % 256


def config_of(kind: str) -> Any:
    if kind == "llama":
        return LlamaConfig(**SIZES, intermediate_size=512)
    if kind == "tied":
        return LlamaConfig(**(SIZES | {"tie_word_embeddings": True}), intermediate_size=512)
    if kind == "mixtral":
        return MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=8, num_experts_per_tok=2)
    return Qwen3MoeConfig(
        **SIZES, intermediate_size=512, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
    )


def model_of(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = {"mixtral": MixtralForCausalLM, "qwen": Qwen3MoeForCausalLM}.get(kind, LlamaForCausalLM)
    model = made(config_of(kind))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # norms of ones would not show who was swapped
                weight.add_(torch.randn_like(weight) * 0.05)
            assert name
    return model


Arrays = Sequence[Mapping[str, np.ndarray]]
Version = tuple[Arrays, Mapping[str, torch.Tensor]]


class Filled:
    """A plan between trainers that hold this, and one replica of a layout; `fill` carries it out in numpy."""

    def __init__(self, kind: str, reported: Sequence[Sequence[Holding]], layout: ReplicaLayout) -> None:
        self.config = config_of(kind)
        self.layout = layout
        self.moves: list[Move] = causal_moves(held_by(reported), card_of(self.config), layout)
        self.plan: Plan = plan_weights(self.moves, trainers=len(reported), receivers=layout.ranks, replicas=["a"])
        self.locals = [local_tensors(self.moves, rank) for rank in range(layout.ranks)]
        self.model = FusedModel(self.config, layout)

    def fill(self, arrays: Arrays) -> list[dict[str, torch.Tensor]]:
        memory = ReplicaMemory(self.plan)
        execute(self.plan, lambda rank, name: arrays[rank][name], memory)
        assert all((count == 1).all() for count in memory.counts.values())
        return [
            {name: tensor_over(memory.tensors["a", rank, name], local) for name, local in locals.items()}
            for rank, locals in enumerate(self.locals)
        ]

    def usual(self, whole: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return load_usual(whole, card_of(self.config), self.layout)

    def check(self, arrays: Arrays, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Fill and compare; returns the logits."""
        return self.compare(self.fill(arrays), whole)

    async def over_fabric(self, versions: Iterable[Version], log: Path) -> list[torch.Tensor]:
        """Bring each version into a replica over the local rail and compare what serves; returns the logits."""
        post, logits = LocalChannels(WEIGHT_CODEC), []
        async with AsyncExitStack() as stack:
            fabrics = [
                await stack.enter_async_context(af.open_fabric(af.FabricConfig(rails=("local",))))
                for _ in range(self.plan.trainers + 1)
            ]
            coordinator = await stack.enter_async_context(open_coordinator(post.open(COORDINATOR), self.plan, log))
            replicas = []
            for rank in range(self.layout.ranks):
                messenger = post.open(receiver_name("a", rank))
                opened = open_replica(fabrics[-1], messenger, self.plan, "a", rank)
                replicas.append(await stack.enter_async_context(opened))
            await coordinator.wait_receivers([receiver_name("a", rank) for rank in range(self.layout.ranks)])
            publishers: list[WeightPublisher] = []
            memory: list[dict[str, np.ndarray]] = []
            for number, (arrays, whole) in enumerate(versions, start=1):
                if not publishers:
                    memory = [{name: array.copy() for name, array in rank.items()} for rank in arrays]
                    for rank, held in enumerate(memory):
                        messenger = post.open(trainer_name(rank))
                        opening = open_publisher(fabrics[rank], messenger, self.plan, rank, held)
                        publishers.append(await stack.enter_async_context(opening))
                for held, rank_arrays in zip(memory, arrays, strict=True):
                    for name, array in held.items():
                        array[...] = rank_arrays[name]  # a training step: the memory stays where it is
                async with trio.open_nursery() as nursery:
                    for publisher in publishers:
                        nursery.start_soon(publisher.publish, number)
                    await coordinator.update(number)
                for replica in replicas:
                    await replica.wait_version(number)
                    assert replica.step_boundary() == number
                got = [
                    {name: tensor_over(replica.tensors()[name], local) for name, local in wanted.items()}
                    for replica, wanted in zip(replicas, self.locals, strict=True)
                ]
                logits.append(self.compare(got, whole))
        return logits

    def compare(self, got: list[dict[str, torch.Tensor]], whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compare bytes of all tensors and bits of logits; returns the logits."""
        expected = self.usual(whole)
        for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                same = tensor.view(torch.uint8), theirs[name].view(torch.uint8)
                assert tensor.shape == theirs[name].shape and torch.equal(*same), (rank, name)
        logits = self.model.logits(got, PROMPTS)
        assert torch.equal(logits, self.model.logits(expected, PROMPTS))
        return logits

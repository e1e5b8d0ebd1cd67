"""Training over an exchange: the losses of a model whose experts live on several ranks are those of the whole model."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="trains modules of torch")
pytest.importorskip("transformers", reason="needs the models of transformers")

from moe_trainings import run  # noqa: E402
from sparse_models import KINDS, VOCABULARY, model_of  # noqa: E402

from asyncfabric.integrations.sparse_blocks import ParallelBlock, config_for, parallelize  # noqa: E402
from asyncfabric.moe import MoeTraining  # noqa: E402

pytestmark = pytest.mark.slow
RANKS = 2
RATE = 0.02


def batch_of(rank: int, step: int) -> Any:
    """A few sentences with a rule to learn: each token follows from the one before. Ranks have different lengths."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    rows = [torch.randint(0, VOCABULARY, (2,), generator=random)]
    for _ in range(5 + 2 * rank):
        rows.append((rows[-1] * 5 + 1) % VOCABULARY)
    return torch.stack(rows, dim=1)


def loss_of(model: Any, tokens: Any) -> Any:
    """The sum over tokens: what ranks may add up."""
    logits = model(tokens, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def whole_losses(model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        batches = [batch_of(rank, step) for rank in range(RANKS)]
        loss = sum(loss_of(model, tokens) for tokens in batches) / sum(tokens[:, 1:].numel() for tokens in batches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class AllReduce:
    """Sums over the threads of this process, as torch.distributed does over processes."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS)
        self.given: list[Any] = [None] * RANKS

    def __call__(self, rank: int, tensors: list[Any]) -> list[Any]:
        self.given[rank] = [tensor.clone() for tensor in tensors]
        self.barrier.wait(60)
        sums = [sum(each) for each in zip(*self.given, strict=True)]
        self.barrier.wait(60)
        return sums


def parallel_losses(model: Any, steps: int) -> list[float]:
    config = config_for(model, ranks=RANKS, max_tokens=64)
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    reduce = AllReduce()
    losses: list[float] = []

    def train(rank: int, training: MoeTraining) -> None:
        mine = models[rank]
        blocks = parallelize(mine, training)
        assert all(isinstance(block, ParallelBlock) for block in blocks)
        experts = {id(parameter) for block in blocks for parameter in block.shard.parameters()}
        shared = [parameter for parameter in mine.parameters() if id(parameter) not in experts]
        optimizer = torch.optim.SGD(mine.parameters(), lr=RATE)
        for step in range(steps):
            count = sum(batch_of(each, step)[:, 1:].numel() for each in range(RANKS))
            optimizer.zero_grad()
            loss = loss_of(mine, batch_of(rank, step)) / count
            loss.backward()
            seen = [parameter for parameter in shared if parameter.requires_grad]
            grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in seen]
            for parameter, grad in zip(seen, reduce(rank, grads), strict=True):
                parameter.grad = grad
            optimizer.step()
            (total,) = reduce(rank, [loss.detach()])
            if rank == 0:
                losses.append(total.item())

    run(config, train)
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_of_a_training_are_those_of_the_whole_model(kind: str) -> None:
    steps = 200 if kind == "mixtral" else 60
    model = model_of(kind, initializer_range=0.12).train()
    whole = whole_losses(copy.deepcopy(model), steps)
    parallel = parallel_losses(model, steps)
    assert whole[-1] < 0.8 * whole[0]
    assert max(abs(one - other) for one, other in zip(whole, parallel, strict=True)) < 1e-5

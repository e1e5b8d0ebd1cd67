"""Gradients through an exchange: those of dense experts in one process, whoever holds the experts and the tokens."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

torch = pytest.importorskip("torch", reason="gradients are torch's")

from moe_fixture import tokens_of  # noqa: E402
from moe_trainings import run  # noqa: E402

import asyncfabric as af  # noqa: E402
from asyncfabric.moe import MoeConfig, MoeGroup, MoeTraining, TrainingStep, gradient_config, open_moe_training  # noqa: E402
from asyncfabric.moe.fp8 import from_fp8, to_fp8  # noqa: E402

pytestmark = pytest.mark.slow
SMALL: dict[str, Any] = {
    "num_experts": 4,
    "top_k": 2,
    "hidden": 16,
    "max_tokens": 8,
    "in_dtype": "float32",
    "out_dtype": "float32",
}


def expert_weights(config: MoeConfig) -> Any:
    """One square matrix for each expert."""
    random = torch.Generator().manual_seed(3)
    shape = (config.num_experts, config.hidden, config.hidden)
    return (torch.randn(shape, generator=random) / config.hidden**0.5).to(config.out_torch)


def apply_experts(own: Any, step: TrainingStep, dtype: Any) -> Any:
    outputs = torch.zeros(step.rows.shape, dtype=dtype)
    for place, count in enumerate(step.tokens_per_expert.tolist()):
        low = int(step.offsets[place])
        outputs[low : low + count] = torch.tanh(step.rows[low : low + count].to(dtype) @ own[place])
    return outputs


def dense(config: MoeConfig, matrices: Any, x: Any, indices: Any, weights: Any) -> Any:
    """The layer in one process, in float64."""
    chosen = matrices[indices.clamp(min=0)]
    outputs = torch.tanh(torch.einsum("th,tkhd->tkd", x, chosen))
    return (outputs * torch.where(indices < 0, 0.0, weights)[..., None]).sum(dim=1)


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"ranks": 4}, 2e-5),
        ({"ranks": 3, "expert_alignment": 8, "private_tokens": 2}, 2e-5),
        ({"ranks": 4, "node_size": 2}, 2e-5),
        ({"ranks": 2, "in_dtype": "bfloat16", "out_dtype": "bfloat16"}, 3e-2),
        ({"ranks": 2, "in_dtype": "bfloat16"}, 1e-2),
        ({"ranks": 2, "in_dtype": "float8_e4m3fn", "scale_block": 16}, 2e-5),
    ],
)
def test_gradients_are_those_of_dense_experts(options: dict[str, Any], tolerance: float, backend: str) -> None:
    """Of tokens, weights and experts; with masked choices, experts named twice, and a rank without tokens."""
    config = MoeConfig(
        **{"num_experts": 10, "top_k": 3, "hidden": 32, "max_tokens": 24, "in_dtype": "float32", "out_dtype": "float32"}
        | options
    )
    given = config.out_torch if config.scales else config.in_torch
    tokens = [tokens_of(config, rank, seed=7, count=0 if rank == 1 else None) for rank in range(config.ranks)]
    x = [
        torch.randn(len(each.x), config.hidden, generator=torch.Generator().manual_seed(rank)).to(given)
        for rank, each in enumerate(tokens)
    ]
    matrices = expert_weights(config)
    found: dict[int, list[Any]] = {}

    def train(rank: int, training: MoeTraining) -> None:
        for _ in range(3):  # the steps of the two exchanges go on
            own = matrices[config.experts_of(rank).start : config.experts_of(rank).stop].clone().requires_grad_()
            mine, weights = x[rank].clone().requires_grad_(), tokens[rank].weights.clone().requires_grad_()
            step = training.dispatch(mine, tokens[rank].indices, weights)
            out = training.combine(apply_experts(own, step, config.out_torch), step)
            (out.double() * _slope(out)).sum().backward()
            found[rank] = [out.detach(), mine.grad, weights.grad, own.grad]

    run(config, train, backend)
    exact = matrices.double().requires_grad_()
    scale = {}
    for rank in range(config.ranks):
        seen = from_fp8(*to_fp8(x[rank], 16), given) if config.scales else x[rank]
        mine, weights = seen.double().requires_grad_(), tokens[rank].weights.double().requires_grad_()
        out = dense(config, exact, mine, tokens[rank].indices, weights)
        (out * _slope(out)).sum().backward()
        scale[rank] = [out.detach(), mine.grad, weights.grad]
    for rank in range(config.ranks):
        experts = config.experts_of(rank)
        assert exact.grad is not None
        wanted = [*scale[rank], exact.grad[experts.start : experts.stop]]
        for name, one, other in zip(("out", "x", "weights", "experts"), found[rank], wanted, strict=True):
            assert one.shape == other.shape, name
            if other.numel():
                error = (one.double() - other).abs().max() / other.abs().max()
                assert error < tolerance, (rank, name, float(error))


def _slope(out: Any) -> Any:
    """A gradient of the output that differs from element to element."""
    return torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).reshape(out.shape)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_weights_keep_more_than_16_bits(dtype: str) -> None:
    """Rows and the output's gradient have 16 bits; their products are sums in fp32, and travel in two pieces."""
    config = MoeConfig(**SMALL | {"in_dtype": dtype, "out_dtype": dtype, "hidden": 64}, ranks=2)
    tokens = [tokens_of(config, rank, seed=4, count=8) for rank in range(2)]
    found = {}

    def train(rank: int, training: MoeTraining) -> None:
        weights = tokens[rank].weights.clone().requires_grad_()
        step = training.dispatch(tokens[rank].x, tokens[rank].indices, weights)
        out = training.combine(step.rows, step)
        out.backward(_slope(out).to(out.dtype))
        found[rank] = weights.grad

    run(config, train)
    for rank, (x, indices, _, _) in enumerate(tokens):
        exact = (x.double() * _slope(x).to(x.dtype).double()).sum(dim=1, keepdim=True) * (indices >= 0)
        assert (found[rank].double() - exact).abs().max() < 2e-5 * exact.abs().max()


def test_nobody_asks_for_the_gradients_of_tokens() -> None:
    """The experts learn, their tokens and weights are data: steps of the second exchange end all the same."""
    config = MoeConfig(**SMALL, ranks=2)
    tokens = [tokens_of(config, rank, seed=2, count=6) for rank in range(2)]
    matrices, grads = expert_weights(config), {}

    def train(rank: int, training: MoeTraining) -> None:
        own = matrices[2 * rank : 2 * rank + 2].clone().requires_grad_()
        for _ in range(2 * config.in_flight + 1):
            step = training.dispatch(tokens[rank].x, tokens[rank].indices, tokens[rank].weights)
            training.combine(apply_experts(own, step, torch.float32), step).sum().backward()
        grads[rank] = own.grad

    run(config, train)
    assert all(grad.abs().max() > 0 for grad in grads.values())


def test_without_gradients_nothing_goes_back() -> None:
    config = MoeConfig(**SMALL, ranks=2)

    @torch.no_grad()
    def train(rank: int, training: MoeTraining) -> None:
        given = tokens_of(config, rank, seed=2, count=6)
        for _ in range(5):
            step = training.dispatch(given.x, given.indices, given.weights)
            out = training.combine(step.rows, step)
            assert not out.requires_grad and not training.exchange.in_flight

    run(config, train)


def test_misuse_is_refused() -> None:
    config = MoeConfig(**SMALL, ranks=1)
    given = tokens_of(config, 0, seed=2, count=6)

    def train(_: int, training: MoeTraining) -> None:
        x = given.x.clone().requires_grad_()
        step = training.dispatch(x, given.indices, given.weights)
        out = training.combine(step.rows, step)
        with pytest.raises(ValueError, match="was combined already"):
            training.combine(step.rows, step)
        out.sum().backward(retain_graph=True)
        grad = x.grad.clone()
        out.sum().backward()  # a second pass over the same graph is a step of its own
        assert torch.equal(x.grad, 2 * grad)
        step = training.dispatch(x, given.indices, given.weights)
        training.combine(step.rows.detach(), step)
        with pytest.raises(RuntimeError, match="comes after that of its combine"):
            step.rows.sum().backward()

    run(config, train)
    raw = MoeConfig(num_experts=4, top_k=2, hidden=16, max_tokens=8, ranks=1, in_dtype="float8_e4m3fn")
    with pytest.raises(ValueError, match="scale_block"):
        gradient_config(raw)


def test_on_the_loops_own_thread_it_is_refused() -> None:
    config = MoeConfig(**SMALL, ranks=1)
    given = tokens_of(config, 0, seed=2, count=6)

    async def main() -> None:
        async with (
            af.open_fabric(af.FabricConfig(rails=("local",))) as fabric,
            open_moe_training(fabric, MoeGroup(0, [fabric.address]), config) as training,
        ):
            with pytest.raises(RuntimeError, match="from a worker thread"):
                training.dispatch(given.x, given.indices, given.weights)

    anyio.run(main, backend="trio")

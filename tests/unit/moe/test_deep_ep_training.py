"""Training through Buffers on host tensors: gradients and losses of all experts in one process; ranks are threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="gradients are torch's")
pytest.importorskip("asyncfabric._native._engine", reason="needs the compiled engine: make build")

sys.path.append(str(Path(__file__).parents[2] / "gpu" / "deep_ep_face"))
import training_cases  # noqa: E402
from deep_ep_ranks import PATIENCE_S, ranks_of  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from asyncfabric import FabricConfig  # noqa: E402
from asyncfabric.integrations import deep_ep  # noqa: E402
from asyncfabric.integrations.deep_ep import training  # noqa: E402

pytestmark = pytest.mark.slow
EXPERTS, HIDDEN = training_cases.EXPERTS, training_cases.HIDDEN


def opened(comm: Any) -> deep_ep.Buffer:
    config = FabricConfig(rails=("local",))
    return deep_ep.Buffer(None, comm=comm, max_tokens_per_rank=32, patience_s=PATIENCE_S, fabric_config=config)


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, "float32"), (2, "bfloat16"), (2, "float16"), (3, "float32"), (3, "bfloat16")]
)
def test_gradients_are_those_of_dense_experts(ranks: int, dtype: str) -> None:
    """With -1 choices, a rank without tokens, and one whose experts get none and are not in its graph."""
    with ranks_of(ranks, opened) as run:
        for top_k in range(1, 9):
            empty, idle = top_k % (ranks + 1) - 1, 0 if top_k in (2, 5) else -1
            run(
                lambda buffer, k=top_k, none=empty, off=idle: training_cases.gradients(
                    buffer, k, dtype, none, off, device="cpu"
                )
            )


def test_losses_of_200_steps_are_those_of_the_unsharded_model() -> None:
    with ranks_of(3, opened) as run:
        run(lambda buffer: training_cases.losses(buffer, 200, device="cpu"))


def given_to(rank: int) -> tuple[Any, Any, Any]:
    tokens = training_cases.tokens_for(rank, 5, 3, torch.float32, -1, range(0))
    return tokens.x, tokens.idx, tokens.weights


def step(buffer: deep_ep.Buffer, x: Any, idx: Any, weights: Any, scale: Any) -> Any:
    """A layer whose experts multiply by a number each."""
    rows, row_idx, row_weights, _, handle = training.dispatch(buffer, x, idx, weights, EXPERTS)
    factors = torch.where(row_idx >= 0, scale[row_idx.clamp(min=0)] * row_weights, 0.0)
    return training.combine(buffer, rows * factors.sum(1, keepdim=True), handle)


def shifted(idx: Any, number: int) -> Any:
    """Return other experts for each layer."""
    return torch.where(idx >= 0, (idx + 5 * number) % EXPERTS, -1)


def apply(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


def test_layers_follow_each_other_and_are_computed_again_by_a_checkpoint() -> None:
    """The forward passes are all made before the first backward pass, and one is made again in it."""

    def body(buffer: deep_ep.Buffer, checkpointed: bool) -> list[Any]:
        x, idx, weights = given_to(buffer.rank)
        own = EXPERTS // buffer.group_size
        scale = (torch.arange(own, dtype=torch.float32) + 1 + buffer.rank * own).requires_grad_()
        x.requires_grad_()
        weights.requires_grad_()
        y = x
        for number in range(4):
            given = (buffer, y, shifted(idx, number), weights, scale)
            run_again = partial(checkpoint, use_reentrant=False) if checkpointed else apply
            y = y + 0.1 * run_again(step, *given)
        y.square().mean().backward()
        return [y.detach(), x.grad, weights.grad, scale.grad]

    with ranks_of(2, opened) as run:
        found = run(lambda buffer: body(buffer, False))
        again = run(lambda buffer: body(buffer, True))
    for rank, (_, x, _, scale) in enumerate(found):
        assert x.abs().max() > 0 and scale.abs().max() > 0
        assert all(torch.equal(one, other) for one, other in zip(found[rank], again[rank], strict=True))
    exact = (torch.arange(EXPERTS, dtype=torch.float64) + 1).requires_grad_()
    for rank, (y, x, weights, _) in enumerate(found):
        given, idx, chosen = given_to(rank)
        whole, chosen = given.double().requires_grad_(), chosen.double().requires_grad_()
        right = whole
        for number in range(4):
            places = shifted(idx, number)
            factors = torch.where(places >= 0, exact[places.clamp(min=0)] * chosen, 0.0).sum(1, keepdim=True)
            right = right * (1 + 0.1 * factors)
        right.square().mean().backward()
        for one, other in ((y, right.detach()), (x, whole.grad), (weights, chosen.grad)):
            assert (one.double() - other).abs().max() <= 1e-5 * other.abs().max()
    scales = torch.cat([each[3] for each in found])
    assert (scales.double() - exact.grad).abs().max() <= 1e-5 * exact.grad.abs().max()


def test_without_gradients_nothing_goes_back() -> None:
    def body(buffer: deep_ep.Buffer) -> None:
        x, idx, weights = given_to(buffer.rank)
        scale = torch.ones(EXPERTS // buffer.group_size, dtype=torch.float32).requires_grad_()
        with torch.no_grad():
            assert not step(buffer, x.requires_grad_(), idx, weights, scale).requires_grad
        for _ in range(3):  # the experts learn, their tokens and weights are data
            step(buffer, x.detach(), idx.int(), weights, scale).sum().backward()
        assert scale.grad is not None and scale.grad.abs().min() > 0

    with ranks_of(2, opened) as run:
        run(body)


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    def body(buffer: deep_ep.Buffer) -> None:
        x, idx, weights = given_to(buffer.rank)
        rows, _, _, _, handle = training.dispatch(buffer, x, idx, weights, EXPERTS)
        cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, r"\[tokens, hidden\]", lambda: training.dispatch(buffer, x[0], idx, weights, EXPERTS)),
            (TypeError, "sends no fp8", lambda: training.dispatch(buffer, x.double(), idx, weights, EXPERTS)),
            (TypeError, "topk_idx must be", lambda: training.dispatch(buffer, x, idx.float(), weights, EXPERTS)),
            (ValueError, "one device", lambda: training.dispatch(buffer, x, idx, weights.to("meta"), EXPERTS)),
            (ValueError, "multiple of the 2", lambda: training.dispatch(buffer, x, idx, weights, 13)),
            (ValueError, "shape of topk_idx", lambda: training.dispatch(buffer, x, idx, weights[:, :1], EXPERTS)),
            (ValueError, "another Buffer", lambda: training.combine(None, rows, handle)),  # type: ignore[arg-type]
            (ValueError, f"{HIDDEN}] of the rows that", lambda: training.combine(buffer, rows[1:], handle)),
            (TypeError, "float32 on cpu, as x", lambda: training.combine(buffer, rows.double(), handle)),
        ]
        for error, text, call in cases:
            with pytest.raises(error, match=text):
                call()
        y = training.combine(buffer, rows, handle)
        assert y.shape == x.shape, "the refused calls left nothing behind"

    with ranks_of(2, opened) as run:
        run(body)


def test_a_graph_from_before_an_exclusion_has_no_backward_pass() -> None:
    met = threading.Barrier(2)

    def body(buffer: deep_ep.Buffer) -> None:
        x, idx, weights = given_to(buffer.rank)
        scale = torch.ones(EXPERTS // buffer.group_size, dtype=torch.float32).requires_grad_()
        y = step(buffer, x.requires_grad_(), idx, weights, scale)
        half = training.dispatch(buffer, x, idx, weights, EXPERTS)
        if buffer.rank == 1:
            return
        buffer.low_latency_update_mask_buffer(1, True)
        with pytest.raises(RuntimeError, match=r"ranks \[1\] were excluded since the dispatch"):
            y.sum().backward()
        met.wait(PATIENCE_S)
        with pytest.raises(RuntimeError, match="begin the training step again"):
            training.combine(buffer, half.rows, half.handle)
        step(buffer, x, idx, weights, scale).sum().backward()
        here = (idx >= 0) & (idx // (EXPERTS // buffer.group_size) != 1)
        right = (weights * here).sum(1, keepdim=True).expand_as(x)
        assert (x.grad - right).abs().max() <= 1e-5

    with ranks_of(3, opened) as run:
        run(body)

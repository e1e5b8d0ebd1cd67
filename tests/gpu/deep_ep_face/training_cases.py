"""Cases of training through a Buffer: gradients and losses are those of all experts in one process.

Run by deep_ep_rank on GPU tensors, and by tests/unit/moe/test_deep_ep_training.py on host tensors; a case asserts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from asyncfabric.integrations.deep_ep import training

EXPERTS, HIDDEN, MOST = 12, 256, 24
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The most that one rounding takes away, as a part of the number."""
NOISE = 3e-6
"""Of products and sums in fp32, as a part of the largest number."""
WIDTH, TOP_K, RATE = 32, 3, 0.05
"""Of the model that is trained: elements of a token, experts of a token, and how fast it learns."""
FURTHEST = 1e-5
"""Of a loss from the unsharded model's, as a part of it."""


class TrainingTokens(NamedTuple):
    """Tokens of a rank, and the gradient of what the layer makes of them."""

    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    slope: torch.Tensor

    def to(self, device: str) -> TrainingTokens:
        """Return copies on a device."""
        return TrainingTokens(*(each.to(device, copy=True) for each in self))


def tokens_for(rank: int, seed: int, top_k: int, dtype: torch.dtype, empty: int, unused: range) -> TrainingTokens:
    """Return random tokens of a rank, none of rank `empty`; some choices are -1, as are those of experts `unused`."""
    draws = torch.Generator().manual_seed(1009 * seed + rank)
    count = 0 if rank == empty else int(torch.randint(2, MOST + 1, (1,), generator=draws))
    x, slope = (torch.randn(count, HIDDEN, generator=draws, dtype=torch.float32).to(dtype) for _ in range(2))
    idx = torch.rand(count, EXPERTS, generator=draws, dtype=torch.float32).topk(top_k, dim=1)[1]
    idx[torch.rand(count, top_k, generator=draws, dtype=torch.float32) < 0.15] = -1
    idx[(idx >= unused.start) & (idx < unused.stop)] = -1
    return TrainingTokens(x, idx, torch.rand(count, top_k, generator=draws, dtype=torch.float32) - 0.3, slope)


def matrices_of(seed: int, dtype: torch.dtype) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    drawn = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=draws, dtype=torch.float32)
    return (drawn / math.sqrt(HIDDEN)).to(dtype)


def apply_experts(
    rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, counts: list[int], matrices: torch.Tensor
) -> torch.Tensor:
    """Return for each row the weighted sum of its experts' outputs, in fp32 and rounded once. The host does not wait.

    Args:
        rows: shape [rows, hidden].
        idx: their experts, -1 for none, shape [rows, top_k].
        weights: same shape.
        counts: how often each expert is in `idx`.
        matrices: of the experts.
    """
    order = idx.flatten().argsort(stable=True)[idx.numel() - sum(counts) :]  # behind those of -1
    row = order // idx.shape[1]
    parts = torch.split(rows.float()[row], counts)
    made = [torch.tanh(part @ matrix.float()) for part, matrix in zip(parts, matrices, strict=True)]
    weighted = torch.cat(made) * weights.flatten()[order, None]
    return torch.zeros_like(rows, dtype=torch.float32).index_add(0, row, weighted).to(rows.dtype)


def dense(
    given: TrainingTokens, every: torch.Tensor, ranks: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Return outputs by each rank's experts, gradients of x by each, and those of weights; adds those of `every`.

    All in float64. The loss is sum(output * slope) + sum(weights of choices that are there).
    """
    own = EXPERTS // ranks
    weights = given.weights.double().requires_grad_()
    there = given.idx >= 0
    parts, inputs = [], []
    for rank in range(ranks):
        x = given.x.double().requires_grad_()
        here = there & (given.idx // own == rank)
        made = torch.zeros(x.shape, dtype=torch.float64)
        for choice in range(given.idx.shape[1]):
            chosen = every[given.idx[:, choice].clamp(min=0)]
            output = torch.tanh(torch.einsum("th,thk->tk", x, chosen))
            made = made + output * torch.where(here[:, choice], weights[:, choice], 0.0)[:, None]
        parts.append(made)
        inputs.append(x)
    (torch.stack(parts).sum(0) * given.slope.double()).sum().backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None
    gradients = [each.grad for each in inputs if each.grad is not None]
    assert len(gradients) == ranks
    return [each.detach() for each in parts], gradients, weights.grad + there


def check(name: str, found: torch.Tensor | None, parts: list[torch.Tensor], rounding: float) -> None:
    """Each part is rounded once and their sum once more, besides the noise of fp32."""
    assert found is not None, name
    right = torch.stack(parts).sum(0)
    assert found.shape == right.shape, name
    if not right.numel():
        return
    bound = rounding * (torch.stack(parts).abs().sum(0) + right.abs()) + NOISE * right.abs().max()
    over = (found.cpu().double() - right).abs() / bound
    assert float(over.max()) <= 1.0, f"{name}: {float(over.max()):.3g} times the bound"


def gradients(
    buffer: Any, top_k: int, dtype: str, empty: int = -1, idle: int = -1, late: bool = False, device: str = "cuda"
) -> None:
    """Outputs and gradients of tokens, weights and experts; the second backward pass of a graph has them again.

    Args:
        buffer: of this rank.
        top_k: choices of a token.
        dtype: of tokens and experts.
        empty: the rank without tokens.
        idle: the rank whose experts no token goes to.
        late: whether the forward pass is on a stream of its own, which is late; the backward pass is called on another.
        device: of the tensors.
    """
    kind, ranks, rank = getattr(torch, dtype), buffer.group_size, buffer.rank
    own = EXPERTS // ranks
    unused = range(idle * own, (idle + 1) * own) if idle >= 0 else range(0)
    everyone = [tokens_for(each, top_k, top_k, kind, empty, unused) for each in range(ranks)]
    every = matrices_of(top_k, kind)
    x, idx, weights, slope = everyone[rank].to(device)
    mine = every[rank * own : (rank + 1) * own].to(device, copy=True).requires_grad_()
    x.requires_grad_()
    weights.requires_grad_()

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        rows, row_idx, row_weights, counts, handle = training.dispatch(buffer, x, idx, weights, EXPERTS)
        assert counts == [int((row_idx == each).sum()) for each in range(own)]
        if not counts or not sum(counts):
            assert rank == idle and not len(rows)
            y = training.combine(buffer, torch.zeros_like(rows), handle)  # its experts are not in the graph
        else:
            y = training.combine(buffer, apply_experts(rows, row_idx, row_weights, counts, mine), handle)
        return y, (y * slope).sum(dtype=torch.float32) + row_weights.sum()

    if late:
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            y, loss = forward()
    else:
        y, loss = forward()
    assert y.dtype == kind
    exact = every.double().requires_grad_()
    right = [dense(each, exact, ranks) for each in everyone][rank]
    outputs, of_x, of_weights = right
    assert exact.grad is not None
    of_experts = exact.grad[rank * own : (rank + 1) * own]
    for again in range(2):
        loss.backward(retain_graph=not again)  # type: ignore[no-untyped-call]
        assert x.grad is not None and x.grad.dtype == kind and weights.grad is not None
        assert weights.grad.dtype == torch.float32 and not weights.grad[idx < 0].any()
        check("x", x.grad, of_x, ROUNDING[kind])
        check("weights", weights.grad, [of_weights], 0.0)
        if rank == idle:
            assert mine.grad is None
        else:
            check("experts", mine.grad, [of_experts], ROUNDING[kind])
        x.grad = weights.grad = mine.grad = None
    if late:
        torch.cuda.current_stream().wait_stream(side)
    check("y", y.detach(), outputs, ROUNDING[kind])


class SmallModel:
    """A projection, a router, experts and a projection back; whole, or with the experts of one rank."""

    def __init__(self, device: str, experts: range) -> None:
        """Have the same numbers on all ranks."""
        draws = torch.Generator().manual_seed(11)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draws, dtype=torch.float32) / math.sqrt(shape[-2])

        before, router, matrices, behind = (
            drawn(WIDTH, WIDTH),
            drawn(WIDTH, EXPERTS),
            drawn(EXPERTS, WIDTH, WIDTH),
            drawn(WIDTH, 4),
        )
        self.shared = [each.to(device).requires_grad_() for each in (before, router, behind)]
        self.experts = matrices[experts.start : experts.stop].to(device, copy=True).requires_grad_()

    def loss(self, x: torch.Tensor, target: torch.Tensor, buffer: Any = None) -> torch.Tensor:
        """Return the sum over tokens; without a Buffer all experts are here."""
        before, router, behind = self.shared
        hidden = x @ before
        weights, idx = torch.softmax(hidden @ router, dim=1).topk(TOP_K, dim=1)
        if buffer is None:
            counts = torch.bincount(idx.flatten(), minlength=EXPERTS).tolist()
            mixed = apply_experts(hidden, idx, weights, counts, self.experts)
        else:
            rows, row_idx, row_weights, counts, handle = training.dispatch(buffer, hidden, idx, weights, EXPERTS)
            mixed = training.combine(buffer, apply_experts(rows, row_idx, row_weights, counts, self.experts), handle)
        return ((hidden + mixed) @ behind - target).square().sum()


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of a rank and what is to be learnt of them; a rank has none every fifth step."""
    draws = torch.Generator().manual_seed(100_003 * rank + step)
    x = torch.randn(0 if (step + rank) % 5 == 0 else 6 + rank, WIDTH, generator=draws, dtype=torch.float32)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), torch.sin(3 * x[:, 3]), x[:, 4] * x[:, 5]], dim=1)


def losses(buffer: Any, steps: int, device: str = "cuda") -> None:
    """Training steps in fp32: the sum of the ranks' losses is the unsharded model's, at each step; it learns."""
    ranks, own = buffer.group_size, EXPERTS // buffer.group_size
    whole = SmallModel(device, range(EXPERTS))
    part = SmallModel(device, range(buffer.rank * own, (buffer.rank + 1) * own))
    found = []
    for step in range(steps):
        batches = [batch_of(rank, step) for rank in range(ranks)]
        tokens = sum(len(x) for x, _ in batches)
        x, target = (torch.cat([batch[place] for batch in batches]).to(device) for place in range(2))
        right = whole.loss(x, target) / tokens
        right.backward()  # type: ignore[no-untyped-call]
        x, target = (each.to(device) for each in batches[buffer.rank])
        loss = part.loss(x, target, buffer) / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        given = [loss.detach(), *(each.grad for each in part.shared)]
        everywhere = buffer._room.gathered([each.cpu() for each in given if each is not None])
        total, *sums = (torch.stack(each).sum(0).to(device) for each in zip(*everywhere, strict=True))
        for parameter, gradient in zip(part.shared, sums, strict=True):
            parameter.grad = gradient
        wanted = right.item()
        found.append(total.item())
        assert abs(found[-1] - wanted) <= FURTHEST * wanted, f"step {step}: {found[-1]} and {wanted}"
        with torch.no_grad():
            for parameter in (*whole.shared, whole.experts, *part.shared, part.experts):
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                parameter.grad = None
    first, last = (sum(each) for each in (found[:20], found[-20:]))
    assert len(found) < 100 or last < 0.7 * first, f"it did not learn: {first / 20} at first, {last / 20} at last"

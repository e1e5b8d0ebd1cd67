"""The rounding rule: a row of a product must not depend on which other rows are computed with it.

Matrix libraries choose their kernels by the number of rows, and kernels add in different orders: a token decoded alone
and the same token decoded in a batch of eight differ in the last bits, and where two logits are that close, in the
answer. Here every product has its rows padded to a multiple of `unit` and cut at `most`, two numbers between which this
library on this machine was measured, when the model was loaded, to give each row the same bits. (The cause and the
remedy stand in "Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LANES = 64
GRAIN = 32768
"""torch computes a function of each element in blocks of up to LANES, what is left by a scalar that rounds otherwise;
threads share from GRAIN elements on, anywhere in a row."""

UNITS = (4, 8, 16)
STRICT = 16
MOST = 512
KEYS = (16, 272, 1040)

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowRule:
    """Rows of a product are padded to a multiple of `unit`, and no product has more than `most` rows."""

    unit: int = STRICT
    most: int = STRICT

    def __post_init__(self) -> None:
        """Check that a full product is a whole number of units."""
        if self.unit < 1 or self.most < self.unit or self.most % self.unit:
            raise ValueError(f"most must be a multiple of unit >= 1, got unit {self.unit} and most {self.most}")

    def linear(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows [n][in] times weight [out][in], plus bias: [n][out]."""
        return self._cut(rows, lambda part: torch.nn.functional.linear(part, weight, bias))

    def product(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Return the batched product of rows [b][n][k] and others [b][k][m]: [b][n][m]."""
        return self._cut(rows, lambda part: torch.bmm(part, others))

    def _cut(self, rows: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        count = rows.shape[-2]
        padding = -count % self.unit
        if padding:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        if rows.shape[-2] <= self.most:
            out = multiply(rows.contiguous())
        else:
            out = torch.cat([multiply(part.contiguous()) for part in torch.split(rows, self.most, dim=-2)], dim=-2)
        return out[..., :count, :]


@torch.inference_mode()
def measure_rule(weights: Iterable[torch.Tensor], kv_heads: int, head_dim: int) -> RowRule:
    """Find the smallest unit for which rows of every product keep their bits; strict tiles when there is none.

    Products are those of the shapes of `weights`, and those of attention over KEYS. Strict tiles are products of
    exactly STRICT rows: one kernel, so one order of additions, wherever a row stands.
    """
    shapes = {(weight.shape, weight.dtype, weight.device): weight for weight in weights}
    products: list[tuple[Multiply, torch.Tensor, int]] = [
        (torch.nn.functional.linear, weight, weight.shape[-1]) for weight in shapes.values()
    ]
    for dtype, device in {(dtype, device) for _, dtype, device in shapes}:
        for length in KEYS:
            keys = _noise(kv_heads, length, head_dim).to(device, dtype)
            products += [(torch.bmm, keys.transpose(1, 2), head_dim), (torch.bmm, keys, length)]
    for unit in UNITS:
        if all(_keeps_bits(multiply, others, width, unit) for multiply, others, width in products):
            return RowRule(unit, MOST)
    return RowRule()


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _keeps_bits(multiply: Multiply, others: torch.Tensor, width: int, unit: int) -> bool:
    rows = _noise(*others.shape[:-2], MOST, width).to(others.device, others.dtype)
    whole = multiply(rows, others)
    for count in (unit, 2 * unit, 3 * unit, 5 * unit, 8 * unit, MOST // 2):
        # The last rows are put first: where a row stands must not matter either.
        for chosen in (slice(0, count), slice(MOST - count, MOST)):
            if not torch.equal(multiply(rows[..., chosen, :].contiguous(), others), whole[..., chosen, :]):
                return False
    return True


def install(model: Any, kv_heads: int, head_dim: int) -> RowRule:
    """Measure the rule for `model` and make all its matrices follow it; returns the rule for its attention."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    others = [module for module in model.modules() if _multiplies(module)]
    stacks = [weight for module in others for weight in module.parameters(recurse=False) if weight.dim() > 1]
    matrices = [weight[0] if weight.dim() > 2 else weight for weight in stacks]
    rule = measure_rule([*(linear.weight for linear in linears), *matrices], kv_heads, head_dim)
    for linear in linears:
        linear.forward = partial(_forward, rule, linear)  # type: ignore[method-assign]
    for module in model.modules():
        if type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations"):
            module.forward = partial(_by_rows, module.forward)
    if others:
        model.set_experts_implementation("eager")  # one product for each expert; others join the experts' rows
    for module in others:
        module.forward = partial(_forward_in, rule, type(module).forward, module)
    return rule


def _multiplies(module: torch.nn.Module) -> bool:
    """Return whether a module holds matrices of its own that are no linear layer's: a router, a stack of experts."""
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
        return False
    return any(weight.dim() > 1 for weight in module.parameters(recurse=False))


def _forward(rule: RowRule, linear: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1])
    return rule.linear(rows, linear.weight, linear.bias).view(*inputs.shape[:-1], linear.weight.shape[0])


def _by_rows(function: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Return a function of each element, such that a row keeps its bits in whatever company."""
    width = inputs.shape[-1]
    rows = inputs.reshape(-1, width)
    if padding := -width % LANES:  # pad() copies also where there is nothing to add
        rows = torch.nn.functional.pad(rows, (0, padding))
    most = max(1, (GRAIN - 1) // rows.shape[1])
    found = torch.cat([function(part) for part in torch.split(rows, most)]) if len(rows) > most else function(rows)
    return found[:, :width].reshape(inputs.shape)


def _forward_in(rule: RowRule, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _LinearRows(rule):
        return forward(*args, **kwargs)


class _LinearRows(TorchFunctionMode):
    """Products of rows [n][in] that code of transformers makes by `functional.linear`, put under the rule."""

    def __init__(self, rule: RowRule) -> None:
        super().__init__()
        self._rule = rule

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, or the rule in its place."""
        called = self._rule.linear if func is torch.nn.functional.linear else func
        return called(*args, **(kwargs or {}))

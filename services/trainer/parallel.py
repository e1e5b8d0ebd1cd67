"""Spreads a causal model over ranks: FSDP2, FSDP2 over tensor parallelism, or experts dealt to ranks. Blocking.

Tensor parallelism and FSDP2 are torch's own. Experts: each rank keeps its part of the stacked tensors as plain
parameters and computes it for the tokens of all ranks; what is not an expert is sharded by FSDP2 over the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

Kind = Literal["fsdp", "tp", "ep"]
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


class ParallelPart(NamedTuple):
    """Where the part of a plain tensor lies: the shape of the whole, and where the part begins."""

    whole: tuple[int, ...]
    start: tuple[int, ...]


def spread(model: Any, kind: Kind = "fsdp", tp: int = 1) -> dict[str, ParallelPart]:
    """Spread a model over the process group of the world, in place; all ranks have equal weights before.

    Args:
        model: a causal model of transformers, on the CPU, or on this rank's GPU.
        kind: fsdp: parameters are sharded; tp: groups of `tp` ranks cut layers, and the groups shard what is left;
            ep: experts are dealt.
        tp: ranks of a group, of kind tp.

    Returns:
        The parameters that are plain parts.

    Raises:
        ValueError: the ranks cannot be divided so, or the model has no experts to deal.
    """
    ranks = dist.get_world_size()
    layers = list(model.model.layers)
    device = next(model.parameters()).device.type
    if kind == "tp":
        if ranks % tp:
            raise ValueError(f"groups of {tp} do not divide {ranks} ranks")
        mesh = init_device_mesh(device, (ranks // tp, tp), mesh_dim_names=("fsdp", "tp"))
        styles: dict[str, ParallelStyle] = dict.fromkeys(COLUMNS, ColwiseParallel())
        styles |= dict.fromkeys(ROWS, RowwiseParallel())
        for layer in layers:
            parallelize_module(layer, mesh["tp"], styles, src_data_rank=None)
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
        return {}
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("fsdp",))
    parts = _deal(model, ranks) if kind == "ep" else {}
    dealt = {parameter for name, parameter in model.named_parameters() if name in parts}
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=dealt)
    fully_shard(model, mesh=mesh, ignored_params=dealt)
    return parts


def _deal(model: Any, ranks: int) -> dict[str, ParallelPart]:
    rank, parts = dist.get_rank(), {}
    for name, module in _experts(model):
        total = module.num_experts
        if total % ranks:
            raise ValueError(f"{name}: {ranks} ranks cannot share {total} experts evenly")
        first = rank * (total // ranks)
        for own in ("gate_up_proj", "down_proj"):
            whole = getattr(module, own)
            parts[f"{name}.{own}"] = ParallelPart(tuple(whole.shape), (first, *[0] * (whole.dim() - 1)))
            mine = nn.Parameter(whole.detach().chunk(ranks)[rank].clone())
            # FSDP2 takes the mean over ranks of all other gradients
            mine.register_hook(lambda grad: grad / ranks)  # type: ignore[no-untyped-call]
            setattr(module, own, mine)
        module.forward = _DealtExperts(module, first)
    if not parts:
        raise ValueError("the model has no stacked experts that could be dealt")
    return parts


def _experts(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter) and hasattr(module, "num_experts"):
            yield name, module


class _DealtExperts:
    """What a layer's experts compute when each rank has some: tokens of all ranks here, sums of all ranks there."""

    def __init__(self, module: Any, first: int) -> None:
        self._module = module
        self._first = first

    def __call__(self, states: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        module = self._module
        everyone, weights = _everyone(states), _everyone(shares)
        chosen = _gathered(index)
        total = torch.zeros_like(everyone)
        for slot in range(len(module.gate_up_proj)):
            tokens, place = torch.where(chosen == self._first + slot)
            gate, up = nn.functional.linear(everyone[tokens], module.gate_up_proj[slot]).chunk(2, dim=-1)
            out = nn.functional.linear(module.act_fn(gate) * up, module.down_proj[slot])
            total = total.index_add(0, tokens, (out * weights[tokens, place, None]).to(total.dtype))
        summed: Tensor = _Summed.apply(total)  # type: ignore[no-untyped-call]
        return summed[dist.get_rank() * len(states) :][: len(states)]


class _Everyone(Function):
    """The tensors of all ranks below each other; each rank gets back the sum of all gradients of its own."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        return _gathered(mine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


class _Summed(Function):
    """The sum over ranks, at each of them."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        total = mine.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def _everyone(mine: Tensor) -> Tensor:
    gathered: Tensor = _Everyone.apply(mine)  # type: ignore[no-untyped-call]
    return gathered


def _gathered(mine: Tensor) -> Tensor:
    found = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine.contiguous())
    return torch.cat(found)

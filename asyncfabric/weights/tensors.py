"""torch tensors as the plan wants them, and back, without a copy: DTensors of FSDP2 and TP, and plain ones.

The only file of this folder that imports torch; it is not part of the front door. Runs on any thread, talks to nobody:
each rank reads its own tensors, and all ranks together are made placements by `held_by`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from asyncfabric.weights.plan.formats import STORED_AS
from asyncfabric.weights.plan.holdings import Holding, LocalTensor
from asyncfabric.weights.plan.placement import Mesh, Placement, Replicate, Shard, boxes, place

_BITS = {"bfloat16": torch.uint16, "float8_e4m3fn": torch.uint8}  # numpy has neither


def placement_of(tensor: torch.Tensor, ranks: Iterable[int] = (0,)) -> Placement:
    """Return which rank holds which box of a tensor.

    Args:
        tensor: a DTensor: the ranks are those of its mesh, numbered as in the process group of the world. Or a plain
            tensor, which each of `ranks` holds whole.
        ranks: of a plain tensor.

    Raises:
        ValueError: a DTensor is a sum that was not made yet (Partial), is cut in an order that the plan cannot state,
            or its local part is not what its placement states.
    """
    if not isinstance(tensor, DTensor):
        held = np.array(sorted(ranks), np.int64)
        return place(tuple(tensor.shape), Mesh(("copies",), held))
    mesh, how = tensor.device_mesh, tensor.placements
    axes = tuple(f"axis{index}" for index in range(len(how)))
    rules: dict[str, Shard | Replicate] = {}
    for axis, rule in zip(axes, how, strict=True):
        if isinstance(rule, TorchReplicate):
            rules[axis] = Replicate()
        elif isinstance(rule, TorchShard) or hasattr(rule, "split_factor"):
            rules[axis] = Shard(int(getattr(rule, "dim")))  # noqa: B009  # torch's base class does not declare it
        else:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is placed as {rule}: shards and copies only")
    sizes = mesh.mesh.shape
    order = sorted(range(len(how)), key=lambda axis: _turn(how, sizes, axis))
    grid = Mesh(tuple(axes[axis] for axis in order), mesh.mesh.permute(order).to(torch.int64).numpy())
    placement = place(tuple(tensor.shape), grid, rules)
    _check_local(tensor, placement)
    return placement


def holdings(
    state: Mapping[str, torch.Tensor], rank: int, parts: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None
) -> list[Holding]:
    """Return what this rank holds of each tensor, to be sent to whoever plans; what it has no part of is left out.

    Args:
        state: the module's state dict as the wrapper gives it, DTensors where it shards; plain tensors are held whole.
        rank: of this process in the world.
        parts: for plain tensors that are a part: (shape of the whole, where the part begins), as with experts that
            each rank keeps some of.

    Raises:
        ValueError: as `placement_of`, a part leaves the whole, or a type that weights do not have, by its name.
    """
    reported = []
    for name, tensor in state.items():
        try:
            dtype = dtype_of(tensor)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; cast it, or leave it out if replicas do not hold it") from None
        if parts is not None and name in parts:
            whole, begin = parts[name]
            boxes(whole, {rank: (begin, tuple(tensor.shape))})  # refuses what leaves the whole
            reported.append(Holding(name, dtype, tuple(whole), tuple(begin), tuple(tensor.shape)))
            continue
        placement = placement_of(tensor, (rank,))
        if rank not in placement.ranks:
            continue
        row = placement.row_of(rank)
        start, size = placement.starts[row].tolist(), placement.sizes[row].tolist()
        reported.append(Holding(name, dtype, tuple(tensor.shape), tuple(start), tuple(size)))
    return reported


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the element type as plans name it; raises ValueError for types that weights do not have."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in STORED_AS:
        raise ValueError(f"a tensor of {tensor.dtype}: weights are of {sorted(STORED_AS)}")
    return name


def stored(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the local part of a tensor as a plan stores it: an array over the same memory, of `STORED_AS`'s type.

    Raises:
        ValueError: the tensor is not on the CPU, or of another type than weights have.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    name = dtype_of(local)
    if local.device.type != "cpu":
        raise ValueError(f"a tensor on {local.device} has no memory that numpy could show; bring it to the host first")
    if name in _BITS:
        local = local.view(_BITS[name])
    return np.asarray(local.numpy())


def arrays_of(state: Mapping[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """Return what this rank holds as a publisher wants it: by name, over the tensors' own memory.

    Those in host memory as arrays, those on a GPU as tensors of their local part.

    Args:
        state: as in `holdings`.
        rank: of this process in the world.

    Raises:
        ValueError: a shard is not contiguous, or as `stored` and `placement_of`.
    """
    arrays: dict[str, Any] = {}
    for one in holdings(state, rank):
        tensor = state[one.name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "cuda":
            if not local.is_contiguous():
                raise ValueError(f"{one.name}: the shard of rank {rank} has strides {local.stride()}: not contiguous")
            arrays[one.name] = local.detach()
            continue
        array = arrays[one.name] = stored(tensor)
        if not array.flags.c_contiguous:
            raise ValueError(f"{one.name}: the shard of rank {rank} has strides {array.strides}: not contiguous")
    return arrays


def tensor_over(memory: NDArray[np.uint8] | torch.Tensor, local: LocalTensor) -> torch.Tensor:
    """Return a tensor over bytes of a replica.

    Args:
        memory: uint8, one dimension, writable, contiguous: an array, which the tensor keeps alive, or a tensor.
        local: its type and shape, of `local_tensors`.

    Raises:
        ValueError: the bytes are more or fewer than the tensor needs.
    """
    size = STORED_AS[local.dtype].itemsize * prod(local.shape)
    if memory.nbytes != size:
        raise ValueError(f"{local.shape} of {local.dtype} needs {size} bytes, got {memory.nbytes}")
    tensor = memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)
    return tensor.view(getattr(torch, local.dtype)).view(local.shape)


def _turn(how: Any, sizes: Any, axis: int) -> tuple[int, int]:
    """Return when an axis cuts: FSDP2 over tensor parallelism cuts what the axes right of it leave of a dimension."""
    factor = getattr(how[axis], "split_factor", 1) if type(how[axis]) is not TorchShard else 1
    if factor == 1:
        return (0, axis)
    right = [other for other in range(axis + 1, len(how)) if getattr(how[other], "dim", None) == how[axis].dim]
    if prod(int(sizes[other]) for other in right) != factor or any(
        getattr(how[other], "split_factor", 1) != 1 and type(how[other]) is not TorchShard for other in right
    ):
        raise ValueError(f"{how} on a mesh of {tuple(sizes)}: the order in which the axes cut is unknown")
    return (1, axis)


def _check_local(tensor: DTensor, placement: Placement) -> None:
    """Wrappers that pad, or cut unevenly after another cut, hold something else than the placement states."""
    rank = int(torch.distributed.get_rank())
    local = tuple(tensor.to_local().shape)
    if rank not in tensor.device_mesh.mesh.reshape(-1).tolist():
        return
    expected = tuple(placement.sizes[placement.row_of(rank)].tolist()) if rank in placement.ranks else None
    if expected != local and not (expected is None and 0 in local):
        raise ValueError(
            f"rank {rank} holds {local} of a tensor of {tuple(tensor.shape)} placed as {tensor.placements}, "
            f"which should be {expected}; choose sizes that the mesh divides"
        )

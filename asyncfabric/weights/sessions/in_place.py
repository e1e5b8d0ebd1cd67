"""In place: the parts of an engine's own tensors that versions arrive in directly, as memory to be registered.

Any thread. What cannot be written as it lies arrives in memory beside, as in a shadow, and is copied from there.
"""

from __future__ import annotations

import logging
from bisect import bisect_right, insort
from collections.abc import Container, Mapping

import torch

from asyncfabric.weights.memory.device import Memory
from asyncfabric.weights.plan.holdings import LocalTensor
from asyncfabric.weights.tensors import stored

logger: logging.Logger = logging.getLogger("asyncfabric.weights")


def memory_within(
    tensors: Mapping[str, torch.Tensor], filled: Mapping[str, LocalTensor], converted: Container[str], device: str
) -> dict[str, Memory]:
    """Return the bytes that a version fills of each tensor that it can be written into.

    That is not what is converted, lies in pieces, on another device than the others, or in another one's memory.

    Args:
        tensors: of the engine.
        filled: type and shape of what a version fills of each, which begins where the tensor does.
        converted: names of those that arrive in another form.
        device: that most lie on, "cpu" or "cuda:N".

    Returns:
        By name: bytes, an array of numpy in host memory, a tensor of torch on a GPU; none has bytes of another one.

    Raises:
        ValueError: a tensor has no memory.
    """
    found: dict[str, Memory] = {}
    taken: list[tuple[int, int]] = []
    beside = []
    for name, one in filled.items():
        if name in converted:
            beside.append(name)
            continue
        if tensors[name].is_meta:
            raise ValueError(
                f"{name} has no memory that a version could arrive in; open the receiver with shadow='host' and use "
                "take()"
            )
        part = tensors[name][tuple(slice(side) for side in one.shape)]
        if not part.numel():
            continue
        begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
        if str(part.device) != device or not part.is_contiguous() or not _free(taken, begin, end):
            beside.append(name)
            continue
        insort(taken, (begin, end))
        found[name] = part.view(-1).view(torch.uint8) if part.is_cuda else stored(part).reshape(-1).view("u1")
    if beside:
        logger.info("%d tensors arrive in memory beside the engine's, such as %s", len(beside), ", ".join(beside[:4]))
    return found


def _free(taken: list[tuple[int, int]], begin: int, end: int) -> bool:
    """Return whether bytes are in none of the ranges, which are in order and apart."""
    at = bisect_right(taken, (begin, end))
    return (at == 0 or taken[at - 1][1] <= begin) and (at == len(taken) or taken[at][0] >= end)

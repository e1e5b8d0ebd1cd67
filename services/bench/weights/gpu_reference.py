"""What a receiver of `bench weights --device cuda` should hold, worked out by torch from whole matrices on its GPU.

Shares no code with plans and with the kernels of updates. The reference of numpy would take minutes for gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from asyncfabric.weights import SCALE_SUFFIX
from asyncfabric_services.bench.weights.workload import FORMS

BLOCK, LARGEST = 128, 448.0


def reference_of(number: int, whole: Tensor, receiver: int, model: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the elements of what one receiver has of a matrix, which is given as the trainers hold it."""
    _, to, block = FORMS[model["form"]]
    name, dim, side = f"matrix {number}", number % 2, model["side"]
    each = -(-side // model["receivers"])
    begin = min(side, receiver * each)
    end = min(side, begin + each)
    if not block:
        yield name, whole.to(getattr(torch, to)).narrow(dim, begin, end - begin)
        return
    weights, scales = _quantised(whole)
    yield name, weights.narrow(dim, begin, end - begin)
    yield name + SCALE_SUFFIX, scales.narrow(dim, begin // BLOCK, -(-end // BLOCK) - begin // BLOCK)


def wrong_tensor(
    served: Mapping[str, Tensor], receiver: int, model: Mapping[str, Any], whole: Callable[[int], Tensor]
) -> str:
    """Return the name of the first tensor of a receiver that is not as it should be; "" when all are.

    Args:
        served: bytes of every tensor, by name.
        receiver: whose they are.
        model: as `weights_workload.plan_of` takes it.
        whole: makes a matrix by its number, on the device of the tensors.
    """
    left = set(served)
    for number in range(model["matrices"]):
        for name, wanted in reference_of(number, whole(number), receiver, model):
            if name not in left or not torch.equal(served[name].view(torch.uint8).view(-1), bytes_of(wanted)):
                return name
            left.remove(name)
    return min(left, default="")


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, in order."""
    return tensor.contiguous().view(torch.uint8).view(-1)


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn, float32 scales of blocks) of a matrix."""
    rows, columns = weight.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    room = (0, across * BLOCK - columns, 0, down * BLOCK - rows)
    blocks = torch.nn.functional.pad(weight.float(), room).view(down, BLOCK, across, BLOCK)
    # By a tensor: by a number torch multiplies with its inverse on GPUs, which is another bit now and then.
    largest = torch.full((), LARGEST, device=weight.device)
    scales = (blocks.abs().amax(dim=(1, 3)) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
    whole = scaled.view(down * BLOCK, across * BLOCK)[:rows, :columns]
    return whole.to(torch.float8_e4m3fn), scales

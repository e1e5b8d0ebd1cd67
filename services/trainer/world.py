"""The process group of a trainer, from torchrun's variables; what ranks share with all others. Blocking.

Bytes go over gloo, also where gradients of GPUs go over NCCL.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEET_SECONDS = 300


def join_world(device: str = "cpu") -> tuple[int, int, str]:
    """Join the process group and return (rank, ranks, device of this rank).

    With "cuda:N" the rank takes that GPU, and tensors there go over NCCL.

    Raises ValueError when torchrun's variables are missing or there is no such GPU, RuntimeError when others are gone.
    """
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start trainers with torchrun, or set what it sets")
    backend = "gloo"
    if device != "cpu":
        count, number = torch.cuda.device_count(), int(device.removeprefix("cuda:"))
        if number >= count:
            raise ValueError(f"{device}: torch sees {count} GPUs; see asyncfabric doctor")
        torch.cuda.set_device(number)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=MEET_SECONDS))
    return dist.get_rank(), dist.get_world_size(), device


def leave_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Return what each rank gave, in their order; all ranks call it at the same time."""
    length = torch.tensor([len(data)])
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    most = max(1, *(int(one) for one in lengths))
    mine = torch.zeros(most, dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = [torch.zeros_like(mine) for _ in lengths]
    dist.all_gather(gathered, mine)
    return [one[: int(count)].numpy().tobytes() for one, count in zip(gathered, lengths, strict=True)]


def sum_over_ranks(*numbers: int) -> tuple[int, ...]:
    """Return the sums of numbers that each rank gives."""
    total = torch.tensor(numbers)
    dist.all_reduce(total)
    return tuple(int(one) for one in total)

"""DeepEP's own tests over this interface: `python deepep_tests.py CHECKOUT test_low_latency --num-processes 2 ...`

CHECKOUT is a clone of github.com/deepseek-ai/DeepEP, of which nothing is built: tests/legacy/NAME.py and
deep_ep/utils/math.py run as they are. What is given to the test in place of DeepEP's:

- `deep_ep`: this package's; `deep_ep.utils.envs.init_dist`: without DeepEP's extension;
- `bench`, `bench_kineto`: few rounds and no times; the latter looks for kernels by DeepEP's names;
- where processes share GPUs, collectives by gloo, since NCCL refuses that.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncfabric.integrations import deep_ep

PORT = 8361  # that DeepEP's init_dist has
CHECKOUT_VARIABLE = "ASYNCFABRIC_DEEPEP_CHECKOUT"  # for the processes that the test spawns


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Do what DeepEP's does."""
    shared = num_local_ranks > torch.cuda.device_count()
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if shared:
        share_collectives()
    where = f"tcp://127.0.0.1:{os.environ.get('MASTER_PORT', PORT)}"
    dist.init_process_group(
        "gloo" if shared else "nccl", init_method=where, world_size=num_local_ranks, rank=local_rank
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("cuda")
    torch.manual_seed(seed + local_rank)
    return local_rank, num_local_ranks, dist.new_group(list(range(num_local_ranks)))


def share_collectives() -> None:
    """Have the collectives that the tests call go over host memory."""
    gather, reduce = dist.all_gather, dist.all_reduce

    def all_gather(found: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        here = [torch.empty_like(each, device="cpu") for each in found]
        gather(here, own.cpu(), group=group)
        for target, source in zip(found, here, strict=True):
            target.copy_(source)

    def all_gather_into_tensor(found: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
        all_gather(list(found.view(dist.get_world_size(group), *own.shape).unbind()), own, group)

    def all_reduce(value: torch.Tensor, group: Any = None) -> None:
        here = value.cpu()
        reduce(here, group=group)
        value.copy_(here)

    for each in (all_gather, all_gather_into_tensor, all_reduce):
        setattr(dist, each.__name__, each)


def bench(fn: Callable[[], Any], **_: Any) -> tuple[float, float, float]:
    """Run it some times, as DeepEP's does; returns no times."""
    for _round in range(4):
        fn()
    torch.cuda.synchronize()
    return 1.0, 1.0, 1.0


def bench_kineto(fn: Callable[[], Any], num_kernels_per_period: int = 1, **_: Any) -> tuple[Any, Any]:
    """Do the same, for two kernels."""
    bench(fn)
    found: Any = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
    return found, found


def module(name: str, **members: Any) -> None:
    """Put a module with these members where the test imports it."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


def prepare() -> None:
    """Put everything in place; in each process, since processes of the test import this file anew."""
    checkout = Path(os.environ[CHECKOUT_VARIABLE])
    deep_ep.install()
    __import__("deep_ep")
    spec = importlib.util.spec_from_file_location("deep_ep.utils.math", checkout / "deep_ep/utils/math.py")
    assert spec is not None and spec.loader is not None
    sys.modules["deep_ep.utils.math"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["deep_ep.utils.math"])
    module("deep_ep.utils.envs", init_dist=init_dist)
    module("deep_ep.utils.testing", bench=bench, bench_kineto=bench_kineto)
    sys.path.insert(0, str(checkout / "tests/legacy"))


def main() -> None:
    """Run the main part of a test, with the functions of the module that its processes can import."""
    test = __import__(sys.argv[2])
    place = str(test.__file__)
    sys.argv = [place, *sys.argv[3:]]
    text = Path(place).read_text()
    main_part = compile(text[text.index("if __name__ ==") :], place, "exec")
    exec(main_part, vars(test) | {"__name__": "__main__"})


if __name__ == "__main__":
    os.environ[CHECKOUT_VARIABLE] = sys.argv[1]
prepare()
if __name__ == "__main__":
    main()

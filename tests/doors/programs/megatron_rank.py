"""One rank of Megatron's expert parallelism over the face in the place of deep_ep, as a process of its own on a host.

Megatron's own manager dispatches and combines, forward and backward. `megatron_rank.py RANK RANKS MEETING` prints a
line of JSON for each dtype: how far sums and gradients are from those of all experts in one process.
"""

from __future__ import annotations

import json
import sys
import types
import warnings

import torch
import torch.distributed as dist

from asyncfabric.integrations import deep_ep

deep_ep.install()
warnings.simplefilter("ignore")  # of what Megatron has not found

from megatron.core.transformer.moe.token_dispatcher import _DeepepManager  # noqa: E402

EXPERTS, TOP_K, HIDDEN, STEPS = 8, 3, 64, 3
RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
OWN = EXPERTS // RANKS
CONFIG = types.SimpleNamespace(
    moe_router_dtype="fp32",
    moe_expert_capacity_factor=None,
    moe_permute_fusion=False,
    moe_deepep_num_sms=20,
    moe_router_padding_for_quantization=False,
)


def tokens_of(rank: int, step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, the map of their experts and the probabilities; the last rank has few tokens."""
    draws = torch.Generator().manual_seed(100 * step + rank)
    count = 2 if rank == RANKS - 1 else 17
    x = torch.randn(count, HIDDEN, generator=draws).to(dtype).requires_grad_()
    chosen = torch.rand(count, EXPERTS, generator=draws).topk(TOP_K, dim=1)[1]
    routing_map = torch.zeros(count, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    probs = (torch.rand(count, EXPERTS, generator=draws) + 0.1).masked_fill(~routing_map, 0.0).requires_grad_()
    return x, routing_map, probs


def experts_of(dtype: torch.dtype) -> torch.Tensor:
    """Return the weights of all experts."""
    draws = torch.Generator().manual_seed(7)
    return (torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=draws) / HIDDEN**0.5).to(dtype)


def sharded(group: dist.ProcessGroup, step: int, dtype: torch.dtype, *, overlapped: bool) -> list[torch.Tensor]:
    """Return sums, and the gradients of tokens, probabilities and own experts."""
    manager = _DeepepManager(group, OWN, TOP_K, EXPERTS, CONFIG)
    x, routing_map, probs = tokens_of(RANK, step, dtype)
    own = experts_of(dtype)[RANK * OWN : (RANK + 1) * OWN].clone().requires_grad_()
    manager.setup_metadata(routing_map, probs)
    rows = manager.dispatch(x, async_finish=overlapped, allocate_on_comm_stream=overlapped)
    rows, row_probs = manager.get_permuted_hidden_states_by_experts(rows)
    counts = manager.get_number_of_tokens_per_expert().tolist()
    parts = [part @ own[place] for place, part in enumerate(rows.split(counts))]
    outputs = (torch.cat(parts).float() * row_probs[:, None]).to(dtype)
    sums = manager.combine(
        manager.get_restored_hidden_states_by_experts(outputs), overlapped, allocate_on_comm_stream=overlapped
    )
    sums.float().square().sum().backward()
    found = [sums.detach(), x.grad, probs.grad, own.grad]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def whole(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the same by all experts in this process."""
    every = experts_of(dtype).requires_grad_()
    given = [tokens_of(rank, step, dtype) for rank in range(RANKS)]
    sums = []
    for x, _, probs in given:
        made = torch.einsum("th,ehk->tek", x.float(), every.float())
        sums.append((made * probs[:, :, None]).sum(1))
    torch.cat(sums).square().sum().backward()
    x, routing_map, probs = given[RANK]
    assert x.grad is not None and probs.grad is not None and every.grad is not None
    return [sums[RANK].detach(), x.grad, probs.grad * routing_map, every.grad[RANK * OWN : (RANK + 1) * OWN]]


def distance(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return how far two tensors are from each other, as a part of the second's length."""
    return float((found.float() - right.float()).norm() / right.float().norm())


def main() -> None:
    """Run steps of each dtype; one buffer serves them all, as Megatron has it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS)
    group = dist.new_group(list(range(RANKS)), backend="gloo")
    for dtype in (torch.float32, torch.bfloat16):
        far = [0.0] * 4
        for step in range(STEPS):
            pairs = zip(sharded(group, step, dtype, overlapped=step == 1), whole(step, dtype), strict=True)
            far = [max(old, distance(*pair)) for old, pair in zip(far, pairs, strict=True)]
        print(json.dumps({"dtype": str(dtype), "far": far}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

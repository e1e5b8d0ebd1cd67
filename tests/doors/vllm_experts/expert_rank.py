"""One rank of vLLM's expert parallelism over the face in the place of deep_ep, as a process of its own on host tensors.

vLLM's own managers make the buffers, and its prepare/finalize classes call them. `expert_rank.py RANK RANKS MEETING`
prints a line of JSON for each case: what is wrong, or nothing.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from asyncfabric.integrations import deep_ep
from asyncfabric.moe.fp8 import from_fp8, to_fp8

deep_ep.install()

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.device_communicators.all2all import DeepEPHTAll2AllManager, DeepEPLLAll2AllManager  # noqa: E402
from vllm.model_executor.layers.fused_moe import modular_kernel  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize  # noqa: E402
from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize  # noqa: E402
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (  # noqa: E402
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

EXPERTS, TOP_K, HIDDEN, MOST = 8, 3, 2048, 16
RANK, RANKS = int(sys.argv[1]), int(sys.argv[2])
OWN = EXPERTS // RANKS
Expert = Callable[[torch.Tensor, int], torch.Tensor]


def given_by(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, their weights and experts; the last rank has none at first."""
    draws = torch.Generator().manual_seed(100 * seed + rank)
    count = 0 if rank == RANKS - 1 and seed == 0 else 5 + 3 * rank
    x = torch.randn(count, HIDDEN, generator=draws).bfloat16()
    ids = torch.rand(count, EXPERTS, generator=draws).topk(TOP_K, dim=1)[1]
    return x, torch.rand(count, TOP_K, generator=draws), ids


def expert(x: torch.Tensor, number: int) -> torch.Tensor:
    """What an expert makes of rows."""
    return x * (number + 1)


def weighted(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return what low-latency calls give: choices in their order, in fp32, rounded once."""
    sums = torch.zeros(x.shape)
    for choice in range(TOP_K):
        made = (x * (ids[:, choice, None] + 1).bfloat16()).float()
        sums += made * weights[:, choice, None]
    return sums.bfloat16()


def high_throughput(prepare: Any, seed: int) -> str:
    """One layer by vLLM's high-throughput class; experts of a rank are weighted and added up there."""
    x, weights, ids = given_by(RANK, seed)
    rows, scales, about, chosen, given = prepare.prepare(
        x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG, False
    )
    everyone = [given_by(rank, seed) for rank in range(RANKS)]
    here = range(RANK * OWN, (RANK + 1) * OWN)
    wanted = torch.cat([x[((ids >= here.start) & (ids < here.stop)).any(1)] for x, _, ids in everyone])
    if scales is not None or not torch.equal(rows, wanted):
        return "rows"
    counts = [sum(int((ids == number).sum()) for _, _, ids in everyone) for number in here]
    if about.expert_num_tokens_cpu.tolist() != counts:
        return "counts"
    sums = torch.zeros(rows.shape)
    for choice in range(TOP_K):
        there = (chosen[:, choice] >= here.start) & (chosen[:, choice] < here.stop)
        made = (rows * (chosen[:, choice, None] + 1).bfloat16()).float() * given[:, choice, None]
        sums += torch.where(there[:, None], made, 0.0)
    output = torch.full_like(x, float("nan"))
    prepare.finalize(output, sums.bfloat16(), weights, ids, False, TopKWeightAndReduceNoOP())
    total = torch.zeros(x.shape)
    for far in range(RANKS):
        other = (RANK + far) % RANKS
        part = torch.zeros(x.shape)
        for choice in range(TOP_K):
            there = ids[:, choice, None] // OWN == other
            made = (x * (ids[:, choice, None] + 1).bfloat16()).float() * weights[:, choice, None]
            part += torch.where(there, made, 0.0)
        total += part.bfloat16().float()
    return "" if torch.equal(output, total.bfloat16()) else "sums"


def low_latency(prepare: Any, seed: int, fp8: bool, by_hooks: bool) -> str:
    """One layer by vLLM's low-latency class, whole or by its hooks."""
    x, weights, ids = given_by(RANK, seed)
    hook, receiver = prepare.prepare_async(x, weights, ids, EXPERTS, None, False, FUSED_MOE_UNQUANTIZED_CONFIG, False)
    hook()
    rows, scales, about, none, nothing = receiver()
    if scales is not None or none is not None or nothing is not None or rows.dtype != torch.bfloat16:
        return "what prepare returns"
    everyone = [given_by(rank, seed) for rank in range(RANKS)]
    outputs = torch.full((OWN, RANKS * MOST, HIDDEN), float("nan")).bfloat16()
    for place in range(OWN):
        number = RANK * OWN + place
        wanted = torch.cat([cast(x, fp8)[(ids == number).any(1)] for x, _, ids in everyone])
        count = int(about.expert_num_tokens[place])
        if not torch.equal(rows[place, :count], wanted):
            return f"rows of expert {number}"
        outputs[place, :count] = expert(rows[place, :count], number)
    output = torch.full_like(x, float("nan"))
    if by_hooks:
        hook, receiver = prepare.finalize_async(output, outputs, weights, ids, False, TopKWeightAndReduceDelegate())
        hook()
        receiver()
    else:
        prepare.finalize(output, outputs, weights, ids, False, TopKWeightAndReduceDelegate())
    return "" if torch.equal(output, weighted(cast(x, fp8), weights, ids)) else "sums"


def cast(x: torch.Tensor, fp8: bool) -> torch.Tensor:
    """Return what arrives of tokens."""
    return from_fp8(*to_fp8(x, 128), torch.bfloat16) if fp8 else x


def main() -> None:
    """Make the managers as vLLM does, and run all cases."""
    torch.set_num_threads(1)
    vars(modular_kernel)["PIN_MEMORY"] = False  # there is no GPU to pin memory for
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=RANKS)
    group = dist.new_group(list(range(RANKS)), backend="gloo")
    parallel_state._DP = parallel_state._TP = types.SimpleNamespace(rank_in_group=RANK, world_size=RANKS)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        fast, quick = DeepEPHTAll2AllManager(group), DeepEPLLAll2AllManager(group)
    fast.set_num_sms(16)
    buffer = fast.get_handle({})
    shape = {
        "max_num_tokens_per_dp_rank": MOST,
        "token_hidden_size": HIDDEN,
        "num_ep_ranks": RANKS,
        "num_global_experts": EXPERTS,
        "num_local_experts": OWN,
    }
    low = quick.get_handle(shape)
    found = {"module": type(buffer).__module__, "one_handle": low is quick.get_handle(shape)}
    print(json.dumps(found), flush=True)
    high = DeepEPHTPrepareAndFinalize(buffer, RANKS, RANKS, RANK * OWN)
    for seed in range(2):
        print(json.dumps({"case": f"high throughput {seed}", "wrong": high_throughput(high, seed)}), flush=True)
    for fp8 in (False, True):
        prepare = DeepEPLLPrepareAndFinalize(low, MOST, RANKS, use_fp8_dispatch=fp8)
        for seed in range(3):
            wrong = low_latency(prepare, seed, fp8, seed == 1)
            print(json.dumps({"case": f"low latency {fp8} {seed}", "wrong": wrong}), flush=True)
    type(quick)._mask = torch.full((RANKS,), 7, dtype=torch.int32)
    wrong = "" if quick.query_active_mask().tolist() == [0] * RANKS else "mask"
    print(json.dumps({"case": "mask", "wrong": wrong}), flush=True)
    dist.barrier()
    fast.destroy(), quick.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

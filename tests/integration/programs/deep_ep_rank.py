"""A program as people write it for DeepEP, on a gloo group: one rank, which prints whether its sums were right."""

from __future__ import annotations

import ctypes
import json
import sys

import torch
import torch.distributed as dist

from asyncfabric import FabricConfig
from asyncfabric.integrations import deep_ep

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 4, 256, 12
PR_SET_PDEATHSIG = 1
kept: list[deep_ep.Buffer] = []


def use(group: dist.ProcessGroup, rail: str) -> dict[str, object]:
    rank, ranks = group.rank(), group.size()
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, EXPERTS)
    buffer = deep_ep.Buffer(
        group,
        int(1e6),
        size,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // ranks,
        fabric_config=FabricConfig(rails=(rail,)),
        max_tokens_per_rank=TOKENS,
    )
    draws = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=draws).bfloat16()
    topk_idx = torch.rand(TOKENS, EXPERTS, generator=draws).topk(TOP_K, dim=1)[1]
    topk_weights = torch.rand(TOKENS, TOP_K, generator=draws)

    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    rows, _, _, counts, handle, event = buffer.dispatch(
        x, None, per_rank, per_node, in_rank, per_expert, topk_idx, topk_weights, async_finish=True
    )
    event.current_stream_wait()
    every = per_expert.clone()
    dist.all_reduce(every, group=group)
    own = EXPERTS // ranks
    counted = counts == every[rank * own : (rank + 1) * own].tolist()
    sums, _, _ = buffer.combine(rows, handle)
    normal = torch.equal(sums, (x.float() * in_rank.sum(1, keepdim=True)).bfloat16())

    packed, _, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    hook()
    sums, _, _ = buffer.low_latency_combine(packed, topk_idx, topk_weights, handle)
    expected = torch.zeros(TOKENS, HIDDEN)
    for choice in range(TOP_K):
        expected += x.float() * topk_weights[:, choice, None]
    low_latency = torch.equal(sums, expected.bfloat16())
    kept.append(buffer)  # until the program ends
    return {"rail": rail, "counted": counted, "normal": normal, "low_latency": low_latency}


ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 9)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=int(sys.argv[1]), world_size=int(sys.argv[2]))
whole = dist.new_group(list(range(dist.get_world_size())))
for each in sys.argv[4:]:
    print(json.dumps(use(whole, each)), flush=True)
dist.barrier()
dist.destroy_process_group()

"""A few small steps between processes, for compute-sanitizer: `sanitized_moe.py PATH decode|prefill`.

PATH is nvlink, proxied or nodes, which is two nodes of two. Decode is rows in parts and one block that routes; prefill
is whole rows and several such blocks. Ranks are processes, since a tool may run the kernels of one process one after
the other. Ends with 1 if a sum is wrong or a rank fails.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from nvlink_rank import PATIENCE_S, ranks_of

SHAPES: dict[str, dict[str, Any]] = {
    "decode": {
        "num_experts": 10,
        "top_k": 4,
        "hidden": 7168,
        "max_tokens": 16,
        "in_dtype": "float8_e4m3fn",
        "scale_block": 128,
        "expert_alignment": 8,
        "private_tokens": 5,
    },
    "prefill": {"num_experts": 21, "top_k": 8, "hidden": 256, "max_tokens": 1100, "private_tokens": 300},
}
HOSTS: dict[str, list[int] | None] = {"nvlink": None, "proxied": [0, 1], "nodes": [0, 0, 1, 1]}
STEPS, DEADLINE_S = 3, 60.0


def main(path: str, case: str) -> int:
    """Do the steps; return the number of what went wrong."""
    hosts = HOSTS[path]
    count = len(hosts or (0, 1))
    devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(count)]
    shape = SHAPES[case] | {"node_size": 2 if path == "nodes" else 1}
    with ranks_of(devices, shape, hosts, deadline_s=DEADLINE_S) as ranks:
        for rank in ranks:
            rank.send("steps", 0, STEPS)
        wrong = [rank.receive() for rank in ranks]
        for rank in ranks:
            rank.send("leave")
        ends = [rank.receive() for rank in ranks]
        for rank in ranks:
            rank.process.join(PATIENCE_S)  # the tool reports when a process ends
        codes = [rank.process.exitcode for rank in ranks]
    print(f"{path}, {case}: {wrong} steps wrong, {ends}, exit codes {codes}")
    return sum(each != good for each, good in ((wrong, [0] * count), (ends, ["closed"] * count), (codes, [0] * count)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""All ranks of a program for DeepEP's interface as threads of one process, each with a stream; runs all cases.

`deep_ep_threads.py RANKS REPLAYS [NAME...]` prints a line of JSON for each case, or for those of some names. Started
with CUDA_MODULE_LOADING=EAGER: nothing can be loaded on a GPU where a kernel waits for another rank of the process.
After a failure no case follows, since ranks are no longer at the same place.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "property")]

import dispatch_cases
import slot_cases
from deep_ep_tokens import MOST_TOKENS, settle
from thread_comm import ThreadComm

from asyncfabric import FabricConfig
from asyncfabric.integrations.deep_ep import Buffer

RANKS, REPLAYS, NAMES = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
POOL_BYTES, SMALL_BYTES = 256 << 20, 512 << 10
STAYS_AWAY, DEADLINE_S, SHORT_DEADLINE_S, PATIENCE_S = 1, 8.0, 3.0, 20.0
os.environ["ASYNCFABRIC_DEEP_EP_GPU"] = "1"
KINDS = ("bfloat16", "float32", "fp8")
CASES: tuple[tuple[Any, ...], ...] = (
    *(("low", top_k, kind, empty, kind != "float32") for kind in KINDS for top_k, empty in ((1, -1), (4, 1), (10, 0))),
    ("low", 4, "fp8", 0, False),
    ("packed",),
    ("overlap",),
    ("waits",),
    ("graph", False, REPLAYS),
    ("graph", True, REPLAYS),
    ("refused",),
    *(("normal", top_k, kind, empty) for top_k, kind, empty in zip((1, 4, 10), KINDS, (-1, 1, 0), strict=True)),
    ("normal", 4, "fp8", -1),
    ("left_alone",),
    ("worst",),
    ("streams",),
    ("right_steps", ()),  # the last two with a buffer of a short deadline
    ("missed", STAYS_AWAY, True),
)


def run(rank: int, values: list[Any], barrier: threading.Barrier) -> None:
    """Open the buffer of a rank and run all cases."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    config = FabricConfig(rails=("local",))
    more: dict[str, Any] = {"max_tokens_per_rank": MOST_TOKENS, "blocks": 32, "fabric_config": config}
    comm = ThreadComm(rank, values, barrier, PATIENCE_S)
    buffer, late = (
        Buffer(None, comm=comm, gpu_deadline_s=deadline_s, **more) for deadline_s in (DEADLINE_S, SHORT_DEADLINE_S)
    )
    with torch.cuda.stream(stream):
        for each in (
            stream,
            buffer.get_comm_stream(),
            late.get_comm_stream(),
        ):  # memory that no case has to ask the driver for
            with torch.cuda.stream(each):
                torch.empty(POOL_BYTES, dtype=torch.uint8, device="cuda")
                [torch.empty(SMALL_BYTES, dtype=torch.uint8, device="cuda") for _ in range(64)]
        for name, *arguments in (case for case in CASES if case[0] in (NAMES or {case[0] for case in CASES})):
            begin, wrong = time.monotonic(), ""
            try:
                case = getattr(slot_cases, name, None) or getattr(dispatch_cases, name)
                case(late if name in ("right_steps", "missed") else buffer, *arguments)
            except Exception:
                wrong = traceback.format_exc()
            settle()
            answers = comm.allgather(wrong)
            if rank == 0:
                about = {"case": f"{name} {arguments}", "wrong": "\n".join(filter(None, answers))}
                print(json.dumps(about | {"seconds": round(time.monotonic() - begin, 2)}), flush=True)
            if any(answers):
                break
        comm.allgather(None)
        buffer.destroy()
        late.destroy()


def main() -> None:
    """Run all ranks; the process ends at once, whatever kernels wait for."""
    torch.set_num_threads(2)
    values, barrier = [None] * RANKS, threading.Barrier(RANKS)
    with ThreadPoolExecutor(RANKS) as pool:
        for each in [pool.submit(run, rank, values, barrier) for rank in range(RANKS)]:
            each.result()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

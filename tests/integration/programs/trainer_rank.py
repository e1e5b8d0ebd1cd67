"""One trainer rank as a process: real steps over gloo; after each it keeps its shards, rank 0 also the whole state."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from trained import model_of

from asyncfabric_services.trainer.training import Training


def main(folder: Path, rank: int, ranks: int, kind: str, how: str, tp: int, dtype: str) -> None:
    """Answer each line with `{"step": n}`."""
    ctypes.CDLL(None).prctl(1, 9)  # no orphan survives the test that started it
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    training = Training(model_of(kind).to(getattr(torch, dtype)), how, tp)  # type: ignore[arg-type]
    (folder / f"held-{rank}").write_bytes(msgspec.msgpack.encode(training.holdings()))
    before = {name: array.ctypes.data for name, array in training.arrays().items()}
    for line in sys.stdin:
        if json.loads(line)["do"] == "close":
            break
        training.step()
        arrays = training.arrays()
        assert before == {name: array.ctypes.data for name, array in arrays.items()}, "memory is registered once"
        np.savez(folder / f"{training.steps}-{rank}.npz", **arrays)
        whole = training.whole_state()
        if rank == 0:
            torch.save(whole, folder / f"{training.steps}.pt")
        print(json.dumps({"step": training.steps, "loss": training.loss}), flush=True)
    dist.destroy_process_group()
    print(json.dumps({"closed": True}), flush=True)


rank, ranks, tp = (int(value) for value in sys.argv[2:5])
main(Path(sys.argv[1]), rank, ranks, sys.argv[5], sys.argv[6], tp, sys.argv[7])

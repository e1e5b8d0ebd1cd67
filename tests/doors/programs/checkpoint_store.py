"""A rank of checkpoint_engine that owns a checkpoint: registers tensors of random bytes, and others on demand."""

from __future__ import annotations

import json
import os
import sys

import torch

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

from asyncfabric.integrations import checkpoint_engine as fabric_store  # noqa: E402
from asyncfabric.integrations.process_fabric import close_process_fabric  # noqa: E402


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        f"pool_{number}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)
        for number, size in enumerate((1 << 20, 5000))
    }


def main() -> None:
    fabric_store.get_ip = lambda: "127.0.0.1"
    store = fabric_store.P2PStore()
    tensors = checkpoint(1)
    store.register_named_tensors(tensors)

    def about() -> dict[str, object]:
        return {"addr": store.addr, "pointers": [tensor.data_ptr() for tensor in tensors.values()]}

    print(json.dumps(about()), file=answers, flush=True)
    for _ in sys.stdin:
        assert store.unregister_named_tensors(list(tensors)) == len(tensors)
        tensors = checkpoint(2)
        store.register_named_tensors(tensors)
        print(json.dumps(about()), file=answers, flush=True)
    store.close()
    close_process_fabric()


if __name__ == "__main__":
    main()

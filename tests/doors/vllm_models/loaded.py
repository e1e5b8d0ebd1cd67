"""What vLLM's own model classes make of checkpoints, one rank of tensor parallelism, as files.

`loaded.py FOLDER RANK RANKS [FAMILY ...]`. Each family is a tiny model of transformers with random weights, saved as a
checkpoint; vLLM's class of it is made on the CPU and loads that checkpoint by its own `load_weights`. Writes
FOLDER/FAMILY-RANK.safetensors, and rank 0 also the trainer's parameters, FOLDER/FAMILY.safetensors.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from families import FAMILIES
from safetensors.torch import load_file, save_file
from tiny_models import Ranks, random_model
from vllm.config import set_current_vllm_config


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    engines = Ranks(folder, rank, ranks)
    for family in sys.argv[4:] or list(FAMILIES):
        checkpoint = folder / f"checkpoint-{family}"
        if rank == 0:
            model, state = random_model(family)
            model.save_pretrained(checkpoint)
            save_file({name: each.detach().clone() for name, each in state.items()}, folder / f"{family}.safetensors")
        dist.barrier()
        options, engine = engines.model(checkpoint)
        with set_current_vllm_config(options):
            engine.load_weights(load_file(checkpoint / "model.safetensors").items())
        found = {name: each.detach().clone().contiguous() for name, each in engine.named_parameters()}
        save_file(found, folder / f"{family}-{rank}.safetensors")
        print(family, len(found), flush=True)
    dist.barrier()
    os._exit(0)  # vLLM leaves groups and threads behind


if __name__ == "__main__":
    main()

"""A rank of a training that sends its weights by vLLM's trainer half. Commands are lines of JSON, each answered by one.

`training_rank.py FOLDER RANK RANKS`. A model is sharded by FSDP2 over gloo; rank 0 writes each version whole into
FOLDER/FAMILY-VERSION.

    {"do": "save", "family", "version"}     make the model anew, and write it as this version
    {"do": "open", "url", "source"}         trainer_init; source "module", or "own", which makes tensors as it goes
    {"do": "send", "version"}               change the weights, write them as this version, send_weights()
    {"do": "publish"}, {"do": "shutdown"}
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
import torch.distributed as dist
import vllm.distributed.weight_transfer.base as base
from tiny_models import random_model
from torch.distributed.fsdp import fully_shard
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

from asyncfabric.integrations.vllm_weights import TrainerInit, register


class OwnSource(base.WeightSource):
    """A source that makes each tensor when it is asked for, buffers too; in the memory of the one before."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state

    def _pairs(self, whole: bool) -> Iterator[tuple[str, torch.Tensor]]:
        room = torch.empty(1 << 16, dtype=torch.bfloat16)
        for name, each in self._state.items():
            if hasattr(each, "full_tensor"):
                each = each.full_tensor() if whole else each.to_local()
            made = room[: each.numel()].view(each.shape) if each.dtype == room.dtype else each
            yield name, made.copy_(each.detach())


if hasattr(base, "Shard"):

    class Source(OwnSource):
        """For vLLM 0.33: parts."""

        @cached_property
        def metadata(self) -> list[Any]:
            found = []
            for name, each in self._state.items():
                how = {}
                if hasattr(each, "placements"):
                    how = {"owners": range(dist.get_world_size()), "placements": (base.Shard(each.placements[0].dim),)}
                found.append(base.ParamMeta(name, each.dtype, tuple(each.shape), **how))
            return found

        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self._pairs(whole=False)

else:

    class Source(OwnSource):  # type: ignore[no-redef]
        """For vLLM 0.26: whole parameters."""

        def metadata(self) -> list[Any]:
            return [base.ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self._state.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self._pairs(whole=True)


class Training:
    """What the commands work on."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._folder, self._rank, self._ranks = folder, rank, ranks

    def save(self, family: str, version: int) -> None:
        self._family = family
        self._model, state = random_model(family)
        if self._ranks > 1:
            for layer in self._model.model.layers:
                fully_shard(layer)
            fully_shard(self._model)
            shards = dict(self._model.named_parameters())
            state = {name: shards.get(name, each) for name, each in state.items()}
        self._state = {name: each.detach() for name, each in state.items()}
        self._write(version)

    def open(self, url: str, source: str, wrong: int = -1) -> None:
        os.environ["ASYNCFABRIC_RAILS"] = "nonsense" if self._rank == wrong else ""
        info = TrainerInit(rank=self._rank, ranks=self._ranks, deadline_s=30)
        found = ModuleSource(self._model) if source == "module" else Source(self._state)
        client = HTTPVLLMWeightSyncClient(url)
        if hasattr(base, "Shard"):
            self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=found)
        else:
            self._trainer = WeightTransferTrainerFactory.trainer_init(
                "asyncfabric", None, info, client=client, source=found
            )

    def send(self, version: int) -> None:
        with torch.no_grad():
            for each in self._state.values():
                local = each.to_local() if hasattr(each, "to_local") else each
                local.mul_(-1.5)
        self._write(version)
        self._trainer.send_weights()

    def publish(self) -> None:
        self._trainer.publish()

    def shutdown(self) -> None:
        self._trainer.shutdown()

    def _write(self, version: int) -> None:
        folder = self._folder / f"{self._family}-{version}"
        state = {
            name: each.full_tensor() if hasattr(each, "full_tensor") else each.clone()
            for name, each in self._state.items()
        }
        if self._rank == 0:
            whole, _ = random_model(self._family)
            assert whole.load_state_dict(state, strict=False).unexpected_keys == []
            whole.save_pretrained(folder)
        if self._ranks > 1:
            dist.barrier()


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/training", rank=rank, world_size=ranks)
    register()
    register()
    training = Training(folder, rank, ranks)
    print(json.dumps({"ready": rank}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            getattr(training, command.pop("do"))(**command)
            print(json.dumps({"done": True}), flush=True)
        except Exception as error:
            print(json.dumps({"raised": f"{type(error).__name__}: {error}"}), flush=True)
    os._exit(0)  # gloo's threads wait for the other ranks


if __name__ == "__main__":
    main()

"""What vLLM's own model classes make of checkpoints, one rank of tensor parallelism, as files.

`loaded.py FOLDER RANK RANKS [FAMILY ...]`. Each family is a tiny model of transformers with random weights, saved as a
checkpoint; vLLM's class of it is made on the CPU and loads that checkpoint by its own `load_weights`. vLLM's compiled
operators are absent: the classes only look them up when they are made, and nothing is computed. Writes
FOLDER/FAMILY-RANK.safetensors, and rank 0 also the trainer's parameters, FOLDER/FAMILY.safetensors.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
import torch.distributed as dist
import transformers
import vllm.platforms
from families import FAMILIES
from safetensors.torch import load_file, save_file
from vllm.platforms.cpu import CpuPlatform

OPERATORS = ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul", "rms_norm", "fused_add_rms_norm")


class Platform(CpuPlatform):
    """vLLM's CPU, with an attention for the classes of latent attention, which it has none for."""

    @classmethod
    def get_attn_backend_cls(cls, *arguments: Any, **options: Any) -> str:
        try:
            return str(super().get_attn_backend_cls(*arguments, **options))
        except NotImplementedError:
            return "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    library = torch.library.Library("_C", "DEF")
    for operator in OPERATORS:
        library.define(operator + "(Tensor! out, Tensor input) -> ()")
    setattr(vllm.platforms, "_current_platform", Platform())  # noqa: B010  # else it looks for a GPU

    from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.attention.backends import fa_utils

    for absent in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func", "get_scheduler_metadata"):
        if getattr(fa_utils, absent, None) is None:  # imported by latent attention, called by nobody here
            setattr(fa_utils, absent, main)
    prefill = importlib.import_module("vllm.v1.attention.backends.mla.prefill.flash_attn")
    prefill.flash_attn_varlen_func = main  # type: ignore[attr-defined]
    init_distributed_environment(ranks, rank, f"file://{folder}/meeting", rank, backend="gloo")
    wanted = sys.argv[4:] or list(FAMILIES)
    for number, family in enumerate(wanted):
        config = FAMILIES[family]()
        config.architectures, config.dtype = [family], "bfloat16"
        checkpoint = folder / f"checkpoint-{family}"
        if rank == 0:
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            kept = model.state_dict()
            state = dict(model.named_parameters()) | {
                name: each for name, each in model.named_buffers() if name in kept
            }
            with torch.no_grad():
                for each in state.values():
                    each.normal_()  # norms and biases too
            model.save_pretrained(checkpoint)
            save_file({name: each.detach().clone() for name, each in state.items()}, folder / f"{family}.safetensors")
        dist.barrier()
        options = VllmConfig(
            model_config=ModelConfig(
                model=str(checkpoint),
                tokenizer=str(checkpoint),
                skip_tokenizer_init=True,
                dtype="bfloat16",
                enforce_eager=True,
                max_model_len=64,
            ),
            parallel_config=ParallelConfig(
                tensor_parallel_size=ranks, distributed_executor_backend="external_launcher"
            ),
            device_config=DeviceConfig(device="cpu"),
        )
        with set_current_vllm_config(options):
            if number == 0:  # by the first family, which has experts: groups for them are made too
                initialize_model_parallel(ranks)
            torch.set_default_dtype(torch.bfloat16)
            engine = initialize_model(vllm_config=options)
            torch.set_default_dtype(torch.float32)
            engine.load_weights(load_file(checkpoint / "model.safetensors").items())
        found = {name: each.detach().clone().contiguous() for name, each in engine.named_parameters()}
        save_file(found, folder / f"{family}-{rank}.safetensors")
        print(family, len(found), flush=True)
    dist.barrier()
    os._exit(0)  # vLLM leaves groups and threads behind


if __name__ == "__main__":
    main()

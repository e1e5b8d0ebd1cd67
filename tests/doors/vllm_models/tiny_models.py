"""vLLM's own model classes on the CPU, tiny and with random weights, one rank of tensor parallelism in this process.

vLLM's compiled operators are absent: the classes only look them up when they are made, and nothing is computed.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import torch
import transformers
import vllm.platforms
from families import FAMILIES
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


def packed(weight: torch.Tensor, output: torch.Tensor, isa: str) -> None:
    """Leave experts in the order that they have: vLLM 0.33 packs them once on the CPU, and in no reload."""
    output.copy_(weight)


def configured(family: str) -> Any:
    """Return the configuration of a family's tiny model."""
    config = FAMILIES[family]()
    config.architectures, config.dtype = [family], "bfloat16"
    return config


def random_model(family: str, seed: int = 7) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model of transformers with random weights, norms and biases too, and its parameters and buffers."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(configured(family), dtype=torch.bfloat16)
    kept = model.state_dict()
    state = dict(model.named_parameters()) | {name: each for name, each in model.named_buffers() if name in kept}
    with torch.no_grad():
        for each in state.values():
            each.normal_()
    return model, state


def known_here(family: str) -> None:
    """Register vLLM's class of a family as loaded: else it starts a process that looks at it, for up to ten seconds."""
    from vllm.model_executor.models import ModelRegistry

    known = ModelRegistry.models[family]
    if hasattr(known, "module_name"):
        ModelRegistry.register_model(family, known.load_model_cls())


class Ranks:
    """The ranks of an engine, each in its own process; makes models."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        """Meet the other ranks over a file in a folder."""
        library = torch.library.Library("_C", "DEF")
        for operator in OPERATORS:
            library.define(operator + "(Tensor! out, Tensor input) -> ()")
        library.define("prepack_moe_weight(Tensor weight, Tensor(a!) output, str isa) -> ()")
        library.impl("prepack_moe_weight", packed, "CPU")
        self._library = library
        setattr(vllm.platforms, "_current_platform", Platform())  # noqa: B010  # else it looks for a GPU
        setattr(torch.cpu, "_is_amx_tile_supported", bool)  # noqa: B010  # no: it would pack weights, by what is compiled

        from vllm.distributed import init_distributed_environment
        from vllm.v1.attention.backends import fa_utils

        for absent in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func", "get_scheduler_metadata"):
            if getattr(fa_utils, absent, None) is None:  # imported by latent attention, called by nobody here
                setattr(fa_utils, absent, configured)
        prefill = importlib.import_module("vllm.v1.attention.backends.mla.prefill.flash_attn")
        prefill.flash_attn_varlen_func = configured  # type: ignore[attr-defined]
        init_distributed_environment(ranks, rank, f"file://{folder}/meeting", rank, backend="gloo")
        self._ranks = ranks
        self._grouped = False

    def model(self, checkpoint: Path, **more: Any) -> tuple[Any, Any]:
        """Return the configuration of vLLM and the model for a checkpoint's configuration; it has loaded nothing."""
        from vllm.config import DeviceConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import initialize_model_parallel
        from vllm.model_executor.model_loader.utils import initialize_model

        for family in transformers.AutoConfig.from_pretrained(checkpoint).architectures:
            known_here(family)
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
                tensor_parallel_size=self._ranks, distributed_executor_backend="external_launcher"
            ),
            device_config=DeviceConfig(device="cpu"),
            **more,
        )
        with set_current_vllm_config(options):
            if not self._grouped:  # by the first family, which has experts: groups for them are made too
                initialize_model_parallel(self._ranks)
                self._grouped = True
            torch.set_default_dtype(torch.bfloat16)
            engine = initialize_model(vllm_config=options)
            torch.set_default_dtype(torch.float32)
        return options, engine

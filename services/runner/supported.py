"""Which models the runner computes as transformers does: an allowlist of model types and of attention arguments. Pure.

Each type, with its window where it has one, is compared with `generate` of transformers and with itself in company by
tests/unit/runner/test_runner_models.py: a type enters the list together with its case there. No torch here: routers
check too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WINDOWED = frozenset(
    {"mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2"}
)  # their attention is given the window of its layer
TYPES = WINDOWED | {"gemma", "granite", "llama", "olmo2", "qwen2_moe"}
UNEVEN_ROPES = {"dynamic", "longrope"}  # angles that depend on the longest request of a batch
WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "output_router_logits"})
"""Arguments of attention that change nothing here: evaluation has no dropout, positions are those of the batch."""
REMEDY = "run another checkpoint, or serve this one with an engine that computes it"


def refuse_unsupported(config: Any) -> None:
    """Raise ValueError for the configuration of a checkpoint that the runner would compute wrongly, or not at all.

    `config` is the configuration of transformers of the whole checkpoint.
    """
    kind = str(getattr(config, "model_type", ""))
    if kind not in TYPES:
        raise ValueError(f"the runner does not compute models of type {kind!r}, only {_listed(TYPES)}: {REMEDY}")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"the runner does not compute quantized checkpoints (quantization_config): {REMEDY}")
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    other = layers - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(f"the runner does not compute layers of {_listed(other)}: {REMEDY}")
    windowed = bool(getattr(config, "sliding_window", None)) or "sliding_attention" in layers
    if windowed and kind not in WINDOWED:
        raise ValueError(f"the runner does not compute the sliding window of models of type {kind!r}: {REMEDY}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in UNEVEN_ROPES:
        raise ValueError(f"rope type {rope!r} makes answers depend on the other requests of a batch: {REMEDY}")


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of attention that would change its result: sinks, a softcap, a bias."""
    wrong = sorted(name for name, value in given.items() if name not in WITHOUT_EFFECT and value is not None)
    if wrong:
        raise ValueError(f"the runner's attention does not compute {', '.join(wrong)}: {REMEDY}")


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names))

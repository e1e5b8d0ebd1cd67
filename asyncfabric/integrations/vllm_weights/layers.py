"""Layers of vLLM's models: the tensors that a loader would fill, and how they come into the memory that kernels read.

vLLM keeps, of each layer, which parameters it was made with; quantisation, shuffled experts and packed matrices replace
them after loading. A version arrives in the former, and goes through the same steps as a reload of vLLM's, layer by
layer: at the end it is in the latter, at the addresses that CUDA graphs have. Source: vllm/model_executor/model_loader/
reload/layerwise.py. The worker's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncfabric.integrations.vllm_weights.versions import (
    SKIP_TENSORS,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    initialize_online_processing,
)


def loadable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that a loader fills, by name, many of them without memory; one that two layers share once.

    What vLLM makes of them afterwards, as matrices of latent attention, is not among them.

    Raises:
        ValueError: vLLM has recorded nothing of the model, so it cannot be reloaded.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    recorded = 0
    for path, layer in model.named_modules():
        live = {name: each for name, each in layer._parameters.items() if each is not None}
        loaded: Mapping[str, torch.Tensor] = get_layerwise_info(layer).restore_metadata[0]
        recorded += len(loaded)
        for name, each in {**{name: live[name] for name in live if name in SKIP_TENSORS}, **loaded}.items():
            if id(live.get(name, each)) not in seen:
                seen.add(id(live.get(name, each)))
                found[f"{path}.{name}" if path else name] = each
    if not recorded:
        raise ValueError("vLLM has recorded no parameter of this model when it was made, so weights cannot be replaced")
    return found


@torch.no_grad()
def load_weights(model: torch.nn.Module, model_config: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Bring weights into a model.

    Args:
        model: one whose `loadable` have these names.
        model_config: of vLLM.
        weights: by name; where a parameter has more rows or columns, as of a vocabulary, the rest becomes 0.
    """
    kept: list[tuple[Any, Any]] = [(each, _loader(each)) for name, each in model.named_parameters() if name in weights]
    initialize_layerwise_reload(model)
    try:
        for path, layer in model.named_modules():
            named: dict[str, tuple[Any, torch.Tensor]] = {
                name: (each, weights[whole])
                for name, each in layer._parameters.items()
                if each is not None and (whole := f"{path}.{name}" if path else name) in weights
            }
            if not named:
                continue
            for each, _ in named.values():
                if each.is_meta:
                    kept.append((each, _loader(each)))
                each.weight_loader = _fill
            initialize_online_processing(layer)
            for each, weight in named.values():
                each.weight_loader(each, weight)
        finalize_layerwise_reload(model, model_config)
    finally:
        for each, loader in kept:  # vLLM goes on with the tensor's own loader, in a reload of another kind
            if loader is None:
                each.__dict__.pop("weight_loader", None)
            elif _loader(each) is not loader:
                each.weight_loader = loader


def _loader(parameter: Any) -> Any:
    return getattr(parameter, "weight_loader", None)


def _fill(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a weight to where a parameter begins; vLLM looks at the name of the first argument."""
    if param.shape != loaded_weight.shape:
        param.data.zero_()
    param.data[tuple(slice(side) for side in loaded_weight.shape)].copy_(loaded_weight)

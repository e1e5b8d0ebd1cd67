"""Layers of vLLM's models: the tensors that a loader would fill, and how they come into the memory that kernels read.

vLLM keeps, of each layer, which parameters it was made with; quantisation, shuffled experts and packed matrices replace
them after loading. A version arrives in the former, and goes through the same steps as a reload of vLLM's, layer by
layer: at the end it is in the latter, at the addresses that CUDA graphs have. Where both are the same in all layers, as
in unquantised dense models on a GPU, it is copied into them together. Source: vllm/model_executor/model_loader/reload/
layerwise.py. The worker's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncfabric.integrations.vllm_weights.versions import (
    SKIP_TENSORS,
    Attention,
    MLAAttention,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
    initialize_online_processing,
)
from asyncfabric.weights.sessions.own_tensors import OwnTensors

UNPROCESSED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Methods of layers whose kernels on a GPU read parameters as a loader leaves them."""


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
    live = _read_as_loaded(model, weights)
    if live is not None:
        _copy_all(model, model_config, live, weights)
        return
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


def _read_as_loaded(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return the tensors that kernels read, by name, if each is as a loader fills it; None if any is not."""
    live: dict[str, torch.Tensor] = {}
    for path, layer in model.named_modules():
        if hasattr(layer, "process_weights_after_loading") and not isinstance(layer, (Attention, MLAAttention)):
            return None
        loaded = get_layerwise_info(layer).restore_metadata[0]
        method = getattr(layer, "quant_method", None)
        for name, each in layer._parameters.items():
            whole = f"{path}.{name}" if path else name
            if each is None or whole not in weights:
                continue
            as_made = loaded.get(name, each)
            alike = (each.shape, each.stride(), each.dtype) == (as_made.shape, as_made.stride(), as_made.dtype)
            if not each.is_cuda or not alike or (method is not None and type(method).__name__ not in UNPROCESSED):
                return None
            live[whole] = each.data
    return live if live.keys() == weights.keys() else None


def _copy_all(
    model: torch.nn.Module,
    model_config: Any,
    live: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Copy weights into what kernels read, and make anew what attention makes of them, as the end of a reload does."""
    for name, each in live.items():
        if each.shape != weights[name].shape:
            each.zero_()
    own = OwnTensors(live, {name: tuple(weight.shape) for name, weight in weights.items()})
    own.copy(0, weights, torch.cuda.current_stream(next(iter(live.values())).device))
    for layer in model.modules():
        if isinstance(layer, (Attention, MLAAttention)):
            layer.process_weights_after_loading(model_config.dtype)


def _loader(parameter: Any) -> Any:
    return getattr(parameter, "weight_loader", None)


def _fill(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Copy a weight to where a parameter begins; vLLM looks at the name of the first argument."""
    if param.shape != loaded_weight.shape:
        param.data.zero_()
    param.data[tuple(slice(side) for side in loaded_weight.shape)].copy_(loaded_weight)

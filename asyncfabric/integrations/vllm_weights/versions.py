"""What differs between the weight transfer of vLLM 0.26 and 0.33, and every name of vLLM that the other files need.

For type checkers its classes are declared as far as they are used here: vLLM is not installed where types are checked,
and a base class of unknown type would hide that of every member.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from dataclasses import dataclass, field

    @dataclass
    class WeightTransferInitInfo:
        """What an engine is given once."""

    @dataclass
    class WeightTransferUpdateInfo:
        """What an engine is given with each update."""

    @dataclass
    class TrainerInitInfo:
        """What a rank of a training is given once."""

        rank: int = field(kw_only=True)

    class WeightTransferEngine:
        """The engine's half; one for each worker."""

        init_info_cls: ClassVar[type]
        update_info_cls: ClassVar[type]
        supports_draft_weight_update: ClassVar[bool]
        vllm_config: Any
        model_config: Any
        parallel_config: Any
        device: torch.device
        model: torch.nn.Module

        def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None: ...

        def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
            """Return what an engine is given with an update, checked."""

    class TrainerWeightTransferEngine:
        """The training's half; one for each rank."""

        client: VLLMWeightSyncClient
        is_sender: bool

        def __init__(self, **named: Any) -> None: ...

    class ModuleSource:
        """A source over the parameters of a module."""

        _module: torch.nn.Module

    SKIP_TENSORS: set[str]
    """Names of parameters that stay as they are in a reload, and that a loader fills there."""

    class Attention(torch.nn.Module):
        """Attention over keys and values that are cached as they are."""

        def process_weights_after_loading(self, act_dtype: Any) -> None:
            """Make anew what it keeps of weights."""

    class MLAAttention(Attention):
        """Latent attention, which keeps matrices of its own."""

    def get_layerwise_info(layer: torch.nn.Module) -> Any:
        """Return what was recorded of a layer when it was made."""

    def initialize_layerwise_reload(model: torch.nn.Module) -> None:
        """Give all layers the parameters that a loader expects, without memory."""

    def initialize_online_processing(layer: torch.nn.Module) -> None:
        """Wrap the loaders of a layer: they process it when all of it is loaded."""

    def finalize_layerwise_reload(model: torch.nn.Module, model_config: Any) -> None:
        """Process what is left, and put the tensors of the kernels back."""

    def set_current_vllm_config(vllm_config: Any) -> AbstractContextManager[None]:
        """Let layers find the configuration meanwhile."""

    def get_tp_group() -> Any:
        """Return the group of tensor parallelism."""
else:
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.distributed.weight_transfer.base import (
        ModuleSource,
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        get_layerwise_info,
        initialize_layerwise_reload,
        initialize_online_processing,
    )
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

__all__ = [
    "SKIP_TENSORS",
    "Attention",
    "MLAAttention",
    "ModuleSource",
    "TrainerInitInfo",
    "TrainerWeightTransferEngine",
    "VLLMWeightSyncClient",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferUpdateInfo",
    "YieldedShare",
    "finalize_layerwise_reload",
    "get_layerwise_info",
    "get_tp_group",
    "initialize_layerwise_reload",
    "initialize_online_processing",
    "named_to_base",
    "set_current_vllm_config",
    "shares_of",
]


class VLLMWeightSyncClient(Protocol):
    """How a training calls its engines; vLLM's HTTP and Ray clients are such."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Call `init_transfer_engine` in every worker."""

    def start_weight_update(self) -> None:
        """Call `start_weight_update` in every worker."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Call `receive_weights` in every worker."""

    def finish_weight_update(self) -> None:
        """Call `finish_weight_update` in every worker."""


class YieldedShare(NamedTuple):
    """A tensor that a source yielded, and what it is of the parameter.

    Attributes:
        name: of the parameter.
        tensor: the rank's part.
        mesh: None for the whole; else the shape of the mesh over `owners`, and the dimension that each of its axes
            cuts, None for copies.
        owners: ranks of the mesh, in its order; of a whole parameter all that yield it.
        whole: shape of the parameter.
    """

    name: str
    tensor: torch.Tensor
    mesh: tuple[tuple[int, ...], tuple[int | None, ...]] | None
    owners: tuple[int, ...]
    whole: tuple[int, ...]


def shares_of(source: Any, ranks: int) -> Iterator[YieldedShare]:
    """Iterate over what a source of vLLM yields at this rank.

    0.26 knows whole parameters alone, which mean something at rank 0. In 0.33 a source states who owns a parameter and
    how it is cut, and yields parts, or whole parameters at every owner.
    """
    metadata = source.metadata
    if callable(metadata):
        for name, tensor in source:
            yield YieldedShare(name, tensor, None, (0,), tuple(tensor.shape))
        return
    known = {one.name: one for one in metadata}
    local = source.implements_iter_local()
    for name, tensor in source.iter_local() if local else source.iter_full():
        one = known[name]
        owners = tuple(range(ranks)) if one.owners is None else one.owners
        mesh = None
        if local and one.placements is not None:
            mesh = (one.mesh_shape, tuple(getattr(cut, "dim", None) for cut in one.placements))
        yield YieldedShare(name, tensor, mesh, owners, tuple(one.shape))


def named_to_base(config: Any, source: Any, client: VLLMWeightSyncClient, rank: int) -> dict[str, Any]:
    """Return the arguments of the constructor of `TrainerWeightTransferEngine`: 0.26 has a config, 0.33 a rank."""
    common = {"client": client, "source": source, "is_sender": rank == 0}
    takes_config = "config_cls" in TrainerWeightTransferEngine.__annotations__
    return common | ({"config": config} if takes_config else {"rank": rank})

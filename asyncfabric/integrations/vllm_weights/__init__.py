"""asyncfabric.integrations.vllm_weights: weights from a training into vLLM, by vLLM's own door, `WeightTransferEngine`.

    vllm serve MODEL --weight-transfer-config '{"backend": "asyncfabric"}'      # the engine; the plugin registers it

    from asyncfabric.integrations.vllm_weights import TrainerInit, register     # each rank of a training

    register()
    trainer = WeightTransferTrainerFactory.trainer_init(TrainerInit(rank=..., ranks=...), client=..., source=...)
    trainer.send_weights()

Every rank of the training sends its own shards, straight to the ranks of the engine that hold them. Written for vLLM
0.26.0 and 0.33.0, which has to be installed; nothing of it is imported before `register()` or `TrainerInit` is used.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncfabric.integrations.vllm_weights.engine import ReceivingEngine
    from asyncfabric.integrations.vllm_weights.trainer import SendingEngine, TrainerInit

__all__ = ["ReceivingEngine", "SendingEngine", "TrainerInit", "plugin", "register"]

BACKEND = "asyncfabric"

logger: logging.Logger = logging.getLogger(__name__)


def register() -> None:
    """Make the backend "asyncfabric" known to both factories of vLLM, as a training has to; again does nothing.

    Raises:
        ImportError: vLLM is not installed, or one that has no such door.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, module, name in (
        (WeightTransferEngineFactory, "engine", "ReceivingEngine"),
        (WeightTransferTrainerFactory, "trainer", "SendingEngine"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, f"{__name__}.{module}", name)


def plugin() -> None:
    """Register in a process of vLLM, which has the door; the entry point `vllm.general_plugins`."""
    try:
        register()
    except ImportError as error:
        logger.info("weights cannot come by asyncfabric: %s", error)


def __getattr__(name: str) -> Any:
    if name == "ReceivingEngine":
        from asyncfabric.integrations.vllm_weights.engine import ReceivingEngine

        return ReceivingEngine
    if name in ("SendingEngine", "TrainerInit"):
        from asyncfabric.integrations.vllm_weights import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

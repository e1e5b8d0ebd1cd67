"""ReceivingEngine: the half of vLLM's weight transfer that runs in each worker of an engine.

The worker's thread. A version arrives beside the engine's weights while it generates, on an event loop in a thread of
its own; `receive_weights`, which vLLM calls between `start_weight_update` and `finish_weight_update`, brings it into
the layers.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch

from asyncfabric.integrations.rails_variable import config_from
from asyncfabric.integrations.vllm_weight_rules import weight_rules
from asyncfabric.integrations.vllm_weights.calling_join import CallingJoin
from asyncfabric.integrations.vllm_weights.layers import load_weights, loadable
from asyncfabric.integrations.vllm_weights.versions import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    get_tp_group,
    set_current_vllm_config,
)
from asyncfabric.weights.blocking import BlockingReceiver, open_receiver
from asyncfabric.weights.sessions.stores import connect_store

logger: logging.Logger = logging.getLogger(__name__)


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """What a worker needs to find the training; `SendingEngine` sends it by vLLM's client.

    Attributes:
        host, port: of the store where both meet.
        shadow: where versions arrive beside the layers: in "host" memory, or on the worker's "device".
        store_deadline_s: how long connecting to it may take.
    """

    host: str
    port: int
    shadow: str = "host"
    store_deadline_s: float = 60.0


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):
    """What a worker needs to know of an update.

    Attributes:
        version: the one to bring into the layers.
        deadline_s: how long it may take to be whole here; it is on its way, or here, when this is sent.
    """

    version: int
    deadline_s: float = 60.0


class ReceivingEngine(WeightTransferEngine):
    """The backend "asyncfabric" of one worker."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        """Make one; vLLM does, by its factory.

        Raises:
            ValueError: the engine is one that weights cannot be planned for; the text names the setting.
        """
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                "weight transfer by asyncfabric knows no pipeline parallelism: pipeline_parallel_size is > 1"
            )
        if parallel.data_parallel_size > 1 and parallel.enable_expert_parallel:
            raise ValueError("weight transfer by asyncfabric knows no experts that several data parallel ranks share")
        self._stack = ExitStack()
        self._receiver: BlockingReceiver | None = None

    @property
    def version(self) -> int:
        """The version that is in the layers, 0 for none of the training."""
        return self._receiver.version if self._receiver else 0

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Join the training; returns when both sides have a plan. Leaves the one that was joined before.

        Raises:
            ValueError: the training's parameters do not go into the layers; the text names the tensor.
            BrokenError: the training's store does not answer, or the training could not be opened.
        """
        self.shutdown()
        group = get_tp_group()
        # Engines of one training have distinct names, ranks of an engine the same.
        name = str(group.broadcast_object(f"vllm-{uuid4().hex[:12]}", src=0))
        tensors = loadable(self.model)
        text = self.model_config.hf_text_config
        rules = weight_rules(
            tensors,
            heads=text.num_attention_heads,
            kv_heads=self.model_config.get_total_num_kv_heads(),
            ranks=group.world_size,
        )
        store = connect_store(init_info.host, init_info.port, init_info.store_deadline_s)
        with ExitStack() as opening:
            self._receiver = opening.enter_context(
                open_receiver(
                    tensors,
                    CallingJoin(store),
                    name=name,
                    rank=group.rank_in_group,
                    ranks=group.world_size,
                    rules=rules,
                    config=config_from(os.environ),
                    shadow=str(self.device) if init_info.shadow == "device" else init_info.shadow,
                    gpu=self.device if self.device.type == "cuda" else None,
                )
            )
            self._stack = opening.pop_all()

    def start_weight_update(self) -> None:
        """Do nothing: the layers stay as they are until the version is whole here."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights; vLLM's own waits for an accelerator, which `receive_weights` has done."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Bring a version into the layers, at the addresses that they have.

        Raises:
            RuntimeError: the engine joined no training.
            TimeoutError: the version is not here by its deadline; the layers are as they were.
            ClosedError: no more versions come; the layers are as they were.
        """
        receiver = self._receiver
        if receiver is None:
            raise RuntimeError("this engine joined no training: init_transfer_engine() comes before receive_weights()")
        if receiver.version >= update_info.version:
            return
        while receiver.poll() < update_info.version:
            receiver.wait(deadline=update_info.deadline_s)
        weights = receiver.take()
        with set_current_vllm_config(self.vllm_config):
            load_weights(self.model, self.model_config, weights)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the memory it came from takes a later version
        logger.info("version %d is in the layers", receiver.version)

    def finish_weight_update(self) -> None:
        """Do nothing: the layers are whole when `receive_weights` returns."""

    def shutdown(self) -> None:
        """Leave the training; the layers stay as they are. Again does nothing."""
        self._receiver = None
        self._stack.pop_all().close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Publish the next version, at each rank of a training; the caller calls the engines itself.

        Args:
            iterator: pairs of name and tensor, as the source of the `SendingEngine` yields them.
            trainer_args: `{"trainer": a SendingEngine}`; its `update_info` goes to `update_weights` afterwards.

        Raises:
            BrokenError, BusyError, ValueError: as `SendingEngine.publish`.
        """
        trainer_args["trainer"].publish(iterator)

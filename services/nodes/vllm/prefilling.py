"""vLLM as the engine of a prefill node: computes prompts, keeps their blocks for the engine that decodes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec
import trio

from asyncfabric import BrokenError, ClosedError
from asyncfabric.actors import Actor, Node, handles
from asyncfabric_services.nodes.messages import PREFILLER, Prefill
from asyncfabric_services.nodes.stage import Stage
from asyncfabric_services.nodes.vllm.host import EngineHost
from asyncfabric_services.nodes.vllm.node import VllmNode, open_vllm, sampling_params
from asyncfabric_services.nodes.vllm.sight import Transfers
from asyncfabric_services.nodes.vllm.translation import prefill_arguments


class VllmPrefill(VllmNode):
    """The prompts of one prefill node."""

    def __init__(self, host: EngineHost, transfers: Transfers, stage: Stage) -> None:
        super().__init__(host, transfers)
        self._stage = stage
        self._draining = trio.Event()

    async def join(self, node: Node) -> None:
        """Spawn the actor that decode nodes ask.

        Cancellation: the node is not to be used.
        """
        await node.spawn(PrefillerActor, self, name=PREFILLER)

    def drain(self) -> None:
        """Take no new prompts."""
        self._draining.set()

    async def prefill(self, message: Prefill) -> bytes:
        """Compute a prompt; returns the kv_transfer_params for the engine that decodes.

        Raises ClosedError while the node drains, ValueError for a prompt that vLLM refuses.

        Cancellation: vLLM aborts the request and frees its blocks.
        """
        if self._draining.is_set():
            raise ClosedError("the prefill node drains", remedy="ask another node")
        transfer = None
        spans, admission = self._stage.spans, self._stage.admission
        with (
            admission.admit() as place,
            spans.open("prefill", message.trace, request=message.attempt, tokens=len(message.prompt)) as span,
            self.waits.open(f"prompt {message.attempt}", "vLLM", len(message.prompt)),
            place.scope,
        ):
            self.transfers.begin(message.attempt, span.context)
            sampling = sampling_params(prefill_arguments())
            async with self.host.generate(message.prompt, sampling, message.attempt, span.context) as outputs:
                async for output in outputs:
                    transfer = output.transfer or transfer
            if transfer is None:
                raise BrokenError("vLLM gave no kv_transfer_params", remedy="is its connector asyncfabric's?")
            return msgspec.json.encode(transfer)
        raise ClosedError("the prefill node was stopped before the prompt was computed", remedy="ask another node")


class PrefillerActor(Actor):
    """Where decode nodes ask a prefill node."""

    mailbox_capacity: ClassVar[int] = 1024
    concurrency: ClassVar[int] = 4096  # vLLM's scheduler bounds how many run

    def __init__(self, engine: VllmPrefill) -> None:
        self._engine = engine

    @handles(Prefill)
    async def prefill(self, message: Prefill) -> bytes:
        """Compute a prompt; see VllmPrefill.prefill."""
        return await self._engine.prefill(message)


@asynccontextmanager
async def open_vllm_prefill(stage: Stage) -> AsyncIterator[VllmPrefill]:
    """Start vLLM for prompts; see open_vllm.

    Cancellation: the engine's process has ended.
    """
    async with open_vllm(stage) as node:
        yield VllmPrefill(node.host, node.transfers, stage)

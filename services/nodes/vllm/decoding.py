"""vLLM as the engine of a decode node: has a prompt computed by a prefill node, loads its blocks, goes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from asyncfabric import BrokenError, PeerError
from asyncfabric.actors import ActorDied, Identity, Membership, Reference, RemoteError
from asyncfabric.observe.spans import SpanRing
from asyncfabric_services.nodes.engine import Cluster
from asyncfabric_services.nodes.messages import PREFILLER, Generate, Prefill, PrefillSource
from asyncfabric_services.nodes.stage import Stage
from asyncfabric_services.nodes.vllm.host import EngineHost, EngineOutput
from asyncfabric_services.nodes.vllm.node import VllmNode, open_vllm, sampling_params
from asyncfabric_services.nodes.vllm.sight import Transfers
from asyncfabric_services.nodes.vllm.translation import read_transfer, sampling_arguments, streamed_tokens

_log = logging.getLogger(__name__)


class VllmDecode(VllmNode):
    """The answers of one decode node."""

    def __init__(self, host: EngineHost, transfers: Transfers, spans: SpanRing) -> None:
        super().__init__(host, transfers)
        self._spans = spans

    @asynccontextmanager
    async def generate(
        self, request: Generate, *, deadline: float, context: str, cluster: Cluster
    ) -> AsyncIterator[AsyncIterator[list[int]]]:
        """Generate an answer within the scope; see DecodeEngine.

        Cancellation: vLLM aborts the request; blocks that were loading go free when the source has confirmed.
        """
        sampling_params(sampling_arguments(request, {}))  # refused before a prefill node computes anything
        source, transfer = await self._prefilled(request, context, cluster)
        sampling = sampling_params(sampling_arguments(request, transfer))
        with (
            self._spans.open("decode", context, request=request.attempt) as span,
            self.waits.open(f"request {request.attempt}", "blocks of its prompt", len(request.prompt), source) as here,
        ):
            self.transfers.begin(request.attempt, span.context)
            async with self.host.generate(request.prompt, sampling, request.attempt, span.context) as outputs:
                yield _tokens(outputs, here)

    async def _prefilled(self, request: Generate, context: str, cluster: Cluster) -> tuple[str, dict[str, Any]]:
        """Have a source compute the prompt; asks one after the other. Returns its name and its answer."""
        failures = list[str]()
        for source in request.sources:
            with (
                self._spans.open("prefill prompt", context, request=request.attempt, source=source.name) as span,
                self.waits.open(f"request {request.attempt}", "its prompt", len(request.prompt), source.name),
            ):
                message = Prefill(request.attempt, request.prompt, span.context)
                try:
                    return source.name, read_transfer(await _asked(source, message, cluster))
                except RemoteError as error:
                    if error.kind == "ValueError":
                        raise ValueError(str(error)) from error
                    failures.append(f"{source.name}: {error}")
                except (ActorDied, PeerError, ValueError) as error:
                    failures.append(f"{source.name}: {error}")
                _log.info("request %s leaves a source: %s", request.attempt, failures[-1])
        raise BrokenError(
            f"no prefill node could compute the prompt: {'; '.join(failures) or 'none was named'}",
            remedy="see the logs of the prefill nodes",
        )


async def _asked(source: PrefillSource, message: Prefill, cluster: Cluster) -> bytes:
    """Ask a prefill node, while it is in the cluster: one that stands still answers nothing and breaks nothing."""
    there = await cluster.link.connect(source.link)
    answer: bytes | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_gone, cluster.membership, there, nursery.cancel_scope)
        try:
            answer = await cluster.node.ask(Reference(there, PREFILLER, 0), message)
        except (ActorDied, PeerError, RemoteError) as error:
            failure: Exception | None = error
        else:
            failure = None
        nursery.cancel_scope.cancel()
    if answer is not None:
        return answer
    raise failure if failure is not None else PeerError(f"{source.name} is in the cluster no more")


async def _cancel_gone(membership: Membership, identity: Identity, scope: trio.CancelScope) -> None:
    seen = False
    async for members in membership.views():
        there = any(member.identity == identity for member in members)
        if seen and not there:
            scope.cancel()
        seen = there


async def _tokens(outputs: AsyncIterator[EngineOutput], began: Callable[[], None]) -> AsyncIterator[list[int]]:
    async for output in outputs:
        began()
        tokens = streamed_tokens(output.tokens, output.finish, output.stopped_by)
        if tokens:
            yield tokens
        if output.finish not in (None, "stop", "length"):
            raise BrokenError(f"vLLM ended the answer: {output.finish}", remedy="see the log of this node")


@asynccontextmanager
async def open_vllm_decode(stage: Stage) -> AsyncIterator[VllmDecode]:
    """Start vLLM for answers; see open_vllm.

    Cancellation: the engine's process has ended.
    """
    async with open_vllm(stage) as node:
        yield VllmDecode(node.host, node.transfers, stage.spans)

"""The loop of a rollout: token after token with the version that serves, which changes between two tokens only.

On the event loop; the model runs on a worker thread, and nothing else touches the weights meanwhile. All ranks of the
replica are here, and they flip together: a step never sees two versions. Replicas with one copy of their weights have
none while the next version is written over it: generation waits then, and reports how long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import trio

from asyncfabric.errors import InternalError
from asyncfabric.weights import LocalTensor
from asyncfabric.weights.tensors import tensor_over
from asyncfabric.weights.update import WeightReplica
from asyncfabric_services.rollout.fingerprint import bytes_digest, logits_digest
from asyncfabric_services.rollout.fused_model import FusedModel, RankTensors

PROMPTS = (b"The weights of ", b"A rollout begins", b"Every byte once ", b"Between two steps")
NEW_TOKENS = 24
REST_SECONDS = 0.002  # between two tokens: whoever shares the machine comes to its turn
MOST_ROWS = 1024

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Served:
    """One version that served.

    Attributes:
        version: its number.
        weights: hash of its tensors when it began to serve.
        logits: hash of its logits of a fixed prompt.
        tokens: generated with it.
        torn: whether its tensors were others when it ceased.
        paused_s: how long generation had waited for it, since the version before it ceased; 0 with a shadow.
        since: when it began, seconds of the monotonic clock.
    """

    version: int
    weights: str
    logits: str
    tokens: int = 0
    torn: bool = False
    paused_s: float = 0.0
    since: float = field(default_factory=time.monotonic)

    def row(self) -> dict[str, Any]:
        """Return it as plain values; `for_s` is how long ago it began to serve."""
        return {
            "version": self.version,
            "weights": self.weights,
            "logits": self.logits,
            "tokens": self.tokens,
            "torn": self.torn,
            "paused_s": round(self.paused_s, 6),
            "for_s": round(time.monotonic() - self.since, 3),
        }


class Generator:
    """Generates with the ranks of one replica.

    Args:
        model: the computation.
        replicas: its ranks, in order.
        tensors: of each rank, types and shapes.
        on_tokens: called with how many tokens came.
    """

    def __init__(
        self,
        model: FusedModel,
        replicas: Sequence[WeightReplica],
        tensors: Sequence[dict[str, LocalTensor]],
        on_tokens: Callable[[int], None],
    ) -> None:
        self.served: list[Served] = []
        self._model = model
        self._replicas = replicas
        self._views = [
            [{name: tensor_over(copy[name], local) for name, local in wanted.items()} for copy in replica.copies]
            for replica, wanted in zip(replicas, tensors, strict=True)
        ]
        self._on_tokens = on_tokens
        self._version = 0
        self._paused_at = 0.0
        self._paused_s = 0.0

    @property
    def version(self) -> int:
        """The version that serves, 0 for none."""
        return self._version

    @property
    def paused(self) -> bool:
        """Whether generation waits because what served is being written over."""
        return bool(self.served) and not self._version

    @property
    def paused_since(self) -> float:
        """When that began, seconds of the monotonic clock; 0 when it does not wait."""
        return self._paused_at if self.paused else 0.0

    @property
    def paused_s(self) -> float:
        """Seconds of all such waits, the present one included."""
        return self._paused_s + (time.monotonic() - self._paused_at if self.paused else 0.0)

    async def run(self) -> None:
        """Generate for ever.

        Cancellation: after the step in progress.
        """
        number = 0
        while True:
            prompt = PROMPTS[number % len(PROMPTS)]
            tokens = torch.frombuffer(bytearray(prompt), dtype=torch.uint8).long()[None] % self._model.card.vocab
            for _ in range(NEW_TOKENS):
                await self._boundary()
                logits = await trio.to_thread.run_sync(self._model.logits, self._ranks(), self._batch(tokens))
                tokens = torch.cat([tokens, logits[:1, -1:].argmax(-1)], dim=1)
                self.served[-1].tokens += 1
                self._on_tokens(1)
                await trio.sleep(REST_SECONDS)
            number += 1

    def _batch(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.expand(self._model.layout.ranks // self._model.layout.tp, -1)

    def _ranks(self) -> list[RankTensors]:
        return [views[one.serving_copy] for views, one in zip(self._views, self._replicas, strict=True)]

    async def _boundary(self) -> None:
        """Flip when all ranks can; wait while nothing serves."""
        while True:
            waiting = [one for one in self._replicas if one.waits_for_boundary]
            if waiting and (self._version == 0 or len(waiting) == len(self._replicas)):
                await self._flip(waiting)
            if self._version:
                return
            async with trio.open_nursery() as nursery:  # whoever is first
                for one in self._replicas:
                    if not one.waits_for_boundary:
                        nursery.start_soon(_until_changed, one, nursery.cancel_scope)

    async def _flip(self, waiting: Sequence[WeightReplica]) -> None:
        if self._version:
            ending = self.served[-1]
            ending.torn = await trio.to_thread.run_sync(bytes_digest, self._ranks()) != ending.weights
            if not all(one.waits_for_boundary for one in waiting):
                return  # the update was aborted meanwhile, and not all know of it: who does not would stop alone
        for one in waiting:
            one.step_boundary()
        versions = {one.current_version() for one in self._replicas}
        if len(versions) > 1:
            if self._version:
                raise InternalError(f"the ranks of one replica flipped to {sorted(versions)}")
            return  # some have begun, the others will
        if self._version and versions == {0}:
            self._paused_at = time.monotonic()
        paused_s = time.monotonic() - self._paused_at if self.paused else 0.0
        self._version = versions.pop()
        if self._version:
            self._paused_s += paused_s
            ranks = self._ranks()
            weights = await trio.to_thread.run_sync(bytes_digest, ranks)
            logits = await trio.to_thread.run_sync(logits_digest, self._model, ranks)
            _log.info("version %d serves", self._version)
            self.served.append(Served(self._version, weights, logits, paused_s=paused_s))
            del self.served[:-MOST_ROWS]


async def _until_changed(one: WeightReplica, scope: trio.CancelScope) -> None:
    await one.wait_changed()
    scope.cancel()

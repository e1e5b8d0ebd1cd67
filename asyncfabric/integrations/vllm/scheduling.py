"""The scheduler's side of the connector: which requests are computed for others, which are loaded, which are held.

The process of vLLM's scheduler. It moves no byte: what workers have to do goes to them with each step.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec

from asyncfabric.integrations.vllm.heads import may_exchange
from asyncfabric.integrations.vllm.messages import PARAMS, Source, source_of, transfer_asked
from asyncfabric.integrations.vllm.steps import Computing, ConnectorStep, Loading, WorkerAddress
from asyncfabric.integrations.vllm.versions import RequestStatus

logger: logging.Logger = logging.getLogger(__name__)


@dataclass
class _Producing:
    transfer: str
    total: int
    blocks: list[int] = field(default_factory=list)
    end: int = 0


class Scheduling:
    """What the scheduler knows of transfers."""

    def __init__(self, engine: str, block_tokens: int, ranks: int, kv_heads: int) -> None:
        """Name transfers after `engine`; every block has `block_tokens` tokens, the model `kv_heads` heads."""
        self._engine, self._tokens, self._ranks, self._kv_heads = engine, block_tokens, ranks, kv_heads
        self._addresses: list[str] = []
        self._order = ""
        self._producing: dict[str, _Producing] = {}
        self._loading: set[str] = set()
        self._next = ConnectorStep()

    def meet(self, workers: dict[int, WorkerAddress]) -> None:
        """Take the addresses of the workers of this engine, by rank."""
        self._addresses = [base64.b64encode(workers[rank].address).decode() for rank in sorted(workers)]
        self._order = workers[min(workers)].order if workers else ""

    def matched(self, request: Any, computed: int) -> int:
        """Return how many tokens of a prompt beyond the `computed` ones another engine pushes."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0
        if self._usable(params) is None:
            source = source_of(params)
            there = "no engine of this connector" if source is None else f"{len(source.addresses)} workers"
            logger.error(
                "request %s is computed here: its kv_transfer_params name %s, and this engine has "
                "tensor_parallel_size %d; both engines need this connector, and each size must divide the %d heads "
                "of keys and values or be a multiple of them",
                request.request_id,
                there,
                self._ranks,
                self._kv_heads,
            )
            params["do_remote_prefill"] = False
            return 0
        return max(0, int(request.num_prompt_tokens) - computed)

    def allocated(self, request: Any, blocks: list[int], external: int) -> None:
        """Take the blocks that a request was given, of which `external` tokens are to be loaded."""
        params = request.kv_transfer_params
        if not params:
            return
        name, total = request.request_id, int(request.num_prompt_tokens)
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            source = source_of(params)
            assert source is not None, "matched() has looked"
            if external <= 0:
                self._next.unwanted.append(source)
                return
            first = (total - external) // self._tokens
            self._loading.add(name)
            self._next.loading.append(Loading(name, source, first, blocks[first : -(-total // self._tokens)]))
        elif params.get("do_remote_decode") and name not in self._producing:
            asked = transfer_asked(params)
            taken = any(each.transfer == asked for each in self._producing.values())
            self._producing[name] = _Producing(f"{self._engine}/{name}" if taken or not asked else asked, total)

    def step(self, scheduled: Any) -> ConnectorStep:
        """Return what workers do in a step."""
        step, self._next = self._next, ConnectorStep()
        step.preempted = list(scheduled.preempted_req_ids or ())
        for new in scheduled.scheduled_new_reqs:
            self._compute(step, scheduled, new.req_id, list(new.block_ids[0]), new.num_computed_tokens, anew=True)
        cached = scheduled.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[number]
            added, resumed = list(blocks[0]) if blocks else [], name in cached.resumed_req_ids
            self._compute(step, scheduled, name, added, cached.num_computed_tokens[number], anew=resumed)
        return step

    def received(self, requests: set[str]) -> None:
        """Take which requests have been loaded, or failed to."""
        self._loading -= requests

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks of a finished request are kept, and what the engine that decodes needs to know."""
        params, name = request.kv_transfer_params, request.request_id
        if not params:
            return False, None
        if found := self._producing.pop(name, None):
            aborted = request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
            self._next.held[name] = aborted
            source = msgspec.to_builtins(Source(found.transfer, self._addresses, self._order))
            # A proxy made for the stock connector passes these on, or looks for them.
            known = {"remote_engine_id": self._engine, "remote_request_id": name, "remote_block_ids": []}
            answer = {"do_remote_prefill": True, "do_remote_decode": False, **known, PARAMS: source}
            return True, None if aborted else answer
        if name in self._loading:
            self._next.cancelled.append(name)
        elif params.get("do_remote_prefill") and (source := self._usable(params)) is not None:
            self._next.unwanted.append(source)
            params["do_remote_prefill"] = False
        return False, None

    def _usable(self, params: dict[str, Any]) -> Source | None:
        source = source_of(params)
        usable = source is not None and may_exchange(self._kv_heads, self._ranks, len(source.addresses))
        return source if usable else None

    def _compute(
        self, step: ConnectorStep, scheduled: Any, name: str, blocks: list[int], computed: int, *, anew: bool
    ) -> None:
        found = self._producing.get(name)
        if found is None:
            return
        found.blocks = blocks if anew else found.blocks + blocks
        if found.end < found.total or anew:
            found.end = computed + scheduled.num_scheduled_tokens[name]
            step.computing.append(Computing(name, found.transfer, list(found.blocks), found.end, found.total))

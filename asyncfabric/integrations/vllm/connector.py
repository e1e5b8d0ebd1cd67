"""Connector: vLLM's interface of KV connectors, handed on to the scheduler's or the worker's side.

vLLM makes two of them, one for each role, which may be in two processes. No method waits for another engine.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from asyncfabric.integrations.vllm.layout import WorkerRank
from asyncfabric.integrations.vllm.parent import end_with
from asyncfabric.integrations.vllm.scheduling import Scheduling
from asyncfabric.integrations.vllm.statistics import FabricMetrics, FabricStats
from asyncfabric.integrations.vllm.steps import ConnectorStep, WorkerAddress
from asyncfabric.integrations.vllm.versions import (
    REPORTS_REQUESTS,
    FullAttentionSpec,
    KVConnectorBase_V1,
    KVConnectorRole,
    MLAAttentionSpec,
    SupportsHMA,
    transfer_results,
)
from asyncfabric.integrations.vllm.working import Working

LEASE_S, LOAD_DEADLINE_S = 30.0, 60.0


class Connector(KVConnectorBase_V1, SupportsHMA):
    """Pushes the KvCache of requests from engines that prefill to engines that decode.

    `kv_connector_extra_config` takes `lease_s`, how long the blocks of a finished request wait for an engine that asks
    for them (30), `load_deadline_s`, after which a load has failed and is computed again (60), and `ends_with_pid`, a
    process of this host that the engine's processes end with.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Made by vLLM.

        Raises:
            ValueError: pipeline or context parallelism, or a KvCache of several groups or without full attention.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        if pid := int(self._kv_transfer_config.kv_connector_extra_config.get("ends_with_pid", 0)):
            end_with(pid)
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) != 1:
                raise ValueError(
                    f"{name}={getattr(parallel, name)} is not supported by asyncfabric's connector, only 1"
                )
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
            kinds = ", ".join(type(spec).__name__ for spec in specs)
            raise ValueError(f"a KvCache of groups ({kinds}) is not supported, only one group of FullAttentionSpec")
        self._blocks, self._tokens = int(kv_cache_config.num_blocks), int(specs[0].block_size)
        self._ranks = int(parallel.tensor_parallel_size)
        latent = isinstance(specs[0], MLAAttentionSpec)
        self._kv_heads = 1 if latent else int(vllm_config.model_config.get_total_num_kv_heads())
        self._scheduling: Scheduling | None = None
        self._working: Working | None = None
        self._failed_blocks: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            engine = str(vllm_config.kv_transfer_config.engine_id)
            self._scheduling = Scheduling(engine, self._tokens, self._ranks, self._kv_heads)

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the fabric of this worker, on the rails that ASYNCFABRIC_RAILS names, and register all layers."""
        settings = self._kv_transfer_config.kv_connector_extra_config
        self._working = Working(
            kv_caches,
            count=self._blocks,
            tokens=self._tokens,
            place=WorkerRank(get_tensor_model_parallel_rank(), self._ranks, self._kv_heads),
            lease_s=float(settings.get("lease_s", LEASE_S)),
            load_deadline_s=float(settings.get("load_deadline_s", LOAD_DEADLINE_S)),
        )

    def get_handshake_metadata(self) -> WorkerAddress | None:
        """Return the address of this worker, which vLLM carries to the scheduler's side."""
        return self._working.address if self._working is not None else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take a step before its forward pass; vLLM 0.33 may start loads only after it."""
        super().bind_connector_metadata(connector_metadata)
        if self._working is not None:
            self._working.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads of the step; none of them is needed by its forward pass."""
        if self._working is not None:
            self._working.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return: a request is scheduled when all its layers have arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Push what the step has computed of a layer, once the stream that computes it has."""
        if self._working is not None:
            self._working.save(layer_name)

    def wait_for_save(self) -> None:
        """Push what layers have not pushed; blocks are kept until they are read, so nothing is waited for."""
        if self._working is not None:
            self._working.finish_step()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Return when nothing reads the blocks of preempted requests."""
        if self._working is not None:
            self._working.preempt(kv_connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks are pushed, or given up, and those whose load has ended."""
        sent, received, _ = self._look()
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the same with the loads that failed (vLLM 0.33)."""
        return transfer_results(*self._look())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of loads that failed (vLLM 0.26); nothing can arrive in them any more."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> FabricStats | None:
        """Return what happened since the last call."""
        return self._working.statistics() if self._working is not None else None

    def shutdown(self) -> None:
        """Drain and close the fabric of this worker."""
        if self._working is not None:
            self._working.close()
            self._working = None

    # ---- scheduler ----

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Take the addresses of the workers."""
        self._planner.meet(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens another engine pushes, and that this happens between steps."""
        count = self._planner.matched(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks of a request."""
        self._planner.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorStep:
        """Return what workers do in this step."""
        return self._planner.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take which loads have ended."""
        self._planner.received(set(connector_output.finished_recving or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the request's blocks are kept until they are pushed, and what its proxy passes on."""
        return self._planner.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the same; there is one group."""
        return self._planner.finished(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return that a load restores the one group (vLLM 0.33)."""
        return (0,)

    # ---- class ----

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return that layers are pushed from within the forward pass."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FabricStats:
        """Return statistics over data of another process."""
        return FabricStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> FabricMetrics:
        """Return what shows the statistics to Prometheus."""
        return FabricMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _planner(self) -> Scheduling:
        assert self._scheduling is not None, "of the scheduler's role"
        return self._scheduling

    def _step(self) -> ConnectorStep:
        step = self._get_connector_metadata()
        assert isinstance(step, ConnectorStep)
        return step

    def _look(self) -> tuple[set[str], set[str], set[str]]:
        if self._working is None:
            return set(), set(), set()
        sent, loads = self._working.look()
        if not REPORTS_REQUESTS:
            self._failed_blocks |= loads.blocks
        return sent, loads.over, loads.failed

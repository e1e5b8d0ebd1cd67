"""Arithmetic over tensors of the CPU in place of vLLM's worker: asked by its real engine core, through its executors.

For nodes: vLLM's AsyncLLM, its engine process, scheduler, executor and connector are real, and find this class by
`worker_cls`; with `tensor_parallel_size` there are several, in processes of their own. It follows the scheduler's
output as a model runner does.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any

import model
import torch
import torch.distributed
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

BLOCKS = int(os.environ.get("ARITHMETIC_BLOCKS", "96"))


class Row:
    """One request as the scheduler describes it."""

    def __init__(self, tokens: list[int], table: list[int], computed: int) -> None:
        self.tokens, self.table, self.computed = tokens, table, computed


class Worker(WorkerBase):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Blocks and connector of one rank."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **arguments: Any) -> None:
        super().__init__(vllm_config, *args, **arguments)
        self.config = vllm_config
        self.ranks = vllm_config.parallel_config.tensor_parallel_size
        self.heads = model.heads_of(self.rank, self.ranks)
        self.rows: dict[str, Row] = {}
        self.step_s = float(os.environ.get("ARITHMETIC_STEP_S", "0"))  # at least, so that tests meet answers half done
        self.head_size = self.model_config.get_head_size()
        self.vocabulary = self.model_config.get_vocab_size()
        for name in model.layer_names():
            vllm_config.compilation_config.static_forward_context[name] = model.Layer()
        self.current = ExitStack()

    def init_device(self) -> None:
        self.current.enter_context(set_current_vllm_config(self.config))
        torch.set_num_threads(1)
        where = self.distributed_init_method
        parallel_state.init_distributed_environment(self.ranks, self.rank, where, self.local_rank, "gloo")
        parallel_state.initialize_model_parallel(self.ranks)

    def load_model(self) -> None:
        """Load nothing: it is arithmetic."""

    def get_kv_cache_spec(self) -> dict[str, Any]:
        spec = FullAttentionSpec(
            block_size=model.BLOCK_TOKENS, num_kv_heads=len(self.heads), head_size=self.head_size, dtype=model.DTYPE
        )
        return dict.fromkeys(model.layer_names(), spec)

    def determine_available_memory(self) -> int:
        spec = next(iter(self.get_kv_cache_spec().values()))
        return int(BLOCKS * spec.page_size_bytes * model.LAYERS)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]

    def set_kv_cache_layout(self, name: str, interleave: int) -> None:
        self.config.cache_config.kv_cache_layout = name

    def get_simple_cpu_offload_num_cpu_blocks(self) -> None:
        return None

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def initialize_from_config(self, described: KVCacheConfig) -> None:
        _, self.caches = model.cache_of(described.num_blocks, self.head_size, heads=len(self.heads))
        kv_transfer_state.ensure_kv_transfer_initialized(self.config, described)
        self.connector = kv_transfer_state.get_kv_transfer_group()
        self.connector.register_kv_caches(self.caches)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        met = self.connector.get_handshake_metadata()
        return None if met is None else {(0, self.rank): met}

    def check_health(self) -> None:
        """Be well."""

    def execute_model(self, scheduled: Any) -> Any:
        for name in scheduled.finished_req_ids:
            self.rows.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.rows[new.req_id] = Row(list(new.prompt_token_ids), list(new.block_ids[0]), new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            row, blocks = self.rows[name], cached.new_block_ids[number]
            added = list(blocks[0]) if blocks else []
            row.table = added if name in cached.resumed_req_ids else row.table + added
            row.computed = cached.num_computed_tokens[number]
        if not scheduled.total_num_scheduled_tokens:
            output = KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
            return output if output is not EMPTY_MODEL_RUNNER_OUTPUT else ModelRunnerOutput([], {})
        time.sleep(self.step_s)
        names, tokens = list(scheduled.num_scheduled_tokens), []
        if scheduled.preempted_req_ids:
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as connected,
        ):
            for layer, (layer_name, cache) in enumerate(self.caches.items()):
                self.connector.wait_for_layer_load(layer_name)
                for name in names:
                    row, count = self.rows[name], scheduled.num_scheduled_tokens[name]
                    new = row.tokens[row.computed : row.computed + count]
                    model.fill(cache, layer, row.table, row.computed, new, self.heads.start)
                self.connector.save_kv_layer(layer_name, cache, None)
            for name in names:
                row = self.rows[name]
                row.computed += scheduled.num_scheduled_tokens[name]
                tokens.append(self._next(row) if row.computed == len(row.tokens) else [])
        positions = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, positions, tokens, kv_connector_output=connected)

    def _next(self, row: Row) -> list[int]:
        row.tokens.append(
            model.next_token(self._of_all_ranks(row), range(len(row.table)), row.computed) % self.vocabulary
        )
        return row.tokens[-1:]

    def _of_all_ranks(self, row: Row) -> list[list[torch.Tensor]]:
        """Return the blocks of a request by layer and rank; every rank asks for the same ones in the same order."""
        mine = [cache[row.table] for cache in self.caches.values()]
        found: list[list[torch.Tensor]] = [mine] * self.ranks
        if self.ranks > 1:
            torch.distributed.all_gather_object(found, mine, parallel_state.get_tp_group().cpu_group)
        return [list(layer) for layer in zip(*found, strict=True)]

    def shutdown(self) -> None:
        kv_transfer_state.ensure_kv_transfer_shutdown()
        self.current.close()

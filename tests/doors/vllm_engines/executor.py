"""A driver in place of vLLM's worker: arithmetic over tensors of the CPU, asked by vLLM's real engine core.

For nodes: vLLM's AsyncLLM, its engine process, scheduler and connector are real, and find this class by
`distributed_executor_backend`. It follows the scheduler's output as a model runner does.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import model
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

BLOCKS = 96


class Row:
    """One request as the scheduler describes it."""

    def __init__(self, tokens: list[int], table: list[int], computed: int) -> None:
        self.tokens, self.table, self.computed = tokens, table, computed


class Worker:
    """Blocks and connector of one engine."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.rows: dict[str, Row] = {}
        self.step_s = float(os.environ.get("ARITHMETIC_STEP_S", "0"))  # at least, so that tests meet answers half done
        self.head_size = config.model_config.get_head_size()
        self.vocabulary = config.model_config.get_vocab_size()
        for name in model.layer_names():
            config.compilation_config.static_forward_context[name] = model.Layer()
        self.current = ExitStack()
        self.current.enter_context(set_current_vllm_config(config))
        torch.set_num_threads(1)
        parallel_state.init_distributed_environment(1, 0, f"file:///tmp/arithmetic-{os.getpid()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        os.unlink(f"/tmp/arithmetic-{os.getpid()}")

    def get_kv_cache_spec(self) -> dict[str, Any]:
        spec = FullAttentionSpec(
            block_size=model.BLOCK_TOKENS, num_kv_heads=model.HEADS, head_size=self.head_size, dtype=model.DTYPE
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

    def initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        described = configs[0]
        _, self.caches = model.cache_of(described.num_blocks, self.head_size)
        kv_transfer_state.ensure_kv_transfer_initialized(self.config, described)
        self.connector = kv_transfer_state.get_kv_transfer_group()
        self.connector.register_kv_caches(self.caches)

    def get_kv_connector_handshake_metadata(self) -> dict[tuple[int, int], Any] | None:
        met = self.connector.get_handshake_metadata()
        return None if met is None else {(0, 0): met}

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
                    model.fill(cache, layer, row.table, row.computed, new)
                self.connector.save_kv_layer(layer_name, cache, None)
            for name in names:
                row = self.rows[name]
                row.computed += scheduled.num_scheduled_tokens[name]
                tokens.append(self._next(row) if row.computed == len(row.tokens) else [])
        positions = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, positions, tokens, kv_connector_output=connected)

    def _next(self, row: Row) -> list[int]:
        row.tokens.append(
            model.next_token([[each] for each in self.caches.values()], row.table, row.computed) % self.vocabulary
        )
        return row.tokens[-1:]

    def shutdown(self) -> None:
        kv_transfer_state.ensure_kv_transfer_shutdown()
        self.current.close()


class ArithmeticExecutor(Executor):
    """One worker in the engine's process."""

    def _init_executor(self) -> None:
        self.worker = Worker(self.vllm_config)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    def initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        """Make the blocks; there is nothing to compile."""
        self.worker.initialize_from_config(configs)

    def compile_or_warm_up_model(self) -> None:
        """Compile nothing."""

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        result = self.worker.execute_model(scheduled)
        if not non_block:
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def check_health(self) -> None:
        """Be well."""

    def shutdown(self) -> None:
        self.worker.shutdown()

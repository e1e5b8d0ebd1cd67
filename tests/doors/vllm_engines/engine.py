"""An engine without a model runner: vLLM's scheduler, its connector of both roles, and tensors of the CPU for blocks.

A process of its own, forked from one that has imported vLLM. It takes requests over a pipe and steps as vLLM's engine
core does; the code between `execute` and the connector is vLLM's own mixin.
"""

from __future__ import annotations

import functools
import os
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncfabric.integrations import nixl

nixl.install()

import model  # noqa: E402  # chooses the platform before the rest of vLLM is imported
import prometheus_client  # noqa: E402
import torch  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl as stock  # noqa: E402,F401  # imported before the fork
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin  # noqa: E402

from asyncfabric.integrations import vllm as ours  # noqa: E402,F401  # as above

AGENT = "_KV_CONNECTOR_AGENT"
"""The connector of a worker's process; here of the worker whose turn it is."""


class Engine:
    """Scheduler, connectors and blocks of one engine."""

    def __init__(
        self,
        folder: Path,
        transfer: dict[str, Any],
        blocks: int,
        head_size: int,
        step_tokens: int,
        packed: bool,
        ranks: int,
        order: str,
    ) -> None:
        self.config = model.configure(folder, transfer, blocks, head_size, step_tokens, ranks)
        heads = len(model.heads_of(0, ranks))
        made = [model.cache_of(blocks, head_size, packed, heads, order) for _ in range(ranks)]
        cache_config, self.caches = made[0][0], [caches for _, caches in made]
        self._current = ExitStack()
        self._current.enter_context(set_current_vllm_config(self.config))
        parallel_state.init_distributed_environment(1, 0, f"file://{folder.absolute()}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        self.workers = [self._worker(rank, ranks, cache_config) for rank in range(ranks)]
        self.gathered = KVOutputAggregator.from_connector(self.workers[0], ranks)
        self.scheduler = Scheduler(
            self.config, cache_config, StructuredOutputManager(self.config), model.BLOCK_TOKENS, log_stats=True
        )
        met = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        if None not in met.values():
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(met)
        self.outputs: dict[str, list[int]] = {}
        self.doomed: dict[str, int] = {}
        self.steps = 0
        self.computed = 0  # tokens
        self.transferred: dict[str, Any] = {}
        self.intervals: list[dict[str, Any]] = []

    def add(self, name: str, prompt: list[int], count: int, params: dict[str, Any] | None) -> None:
        """Queue a request."""
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, extra_args={"kv_transfer_params": params})
        self.outputs[name] = []
        self.scheduler.add_request(Request(name, prompt, sampling, None))

    def abort(self, name: str) -> None:
        """Finish a request as vLLM's engine does when a client has gone."""
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def abort_at(self, name: str, computed: int) -> None:
        """Abort a request before the first step in which it has so many tokens computed."""
        self.doomed[name] = computed

    @property
    def busy(self) -> bool:
        """Whether the engine's core would step."""
        return bool(self.scheduler.requests) or self.scheduler.has_requests()

    def step(self) -> list[dict[str, Any]]:
        """Run one step and return the requests that it finished."""
        for name, computed in list(self.doomed.items()):
            if name in self.scheduler.requests and self.scheduler.requests[name].num_computed_tokens >= computed:
                del self.doomed[name]
                self.abort(name)
        scheduled = self.scheduler.schedule()
        produced = self._execute(scheduled)
        self.steps += 1
        self.computed += scheduled.total_num_scheduled_tokens
        finished = []
        for outputs in self.scheduler.update_from_output(scheduled, produced).values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    finished.append(
                        {
                            "name": output.request_id,
                            "tokens": self.outputs.pop(output.request_id),
                            "params": output.kv_transfer_params,
                            "reason": str(output.finish_reason),
                        }
                    )
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self._observe(outputs.scheduler_stats.kv_connector_stats)
        for one in finished:
            one["pushed"] = self.transferred.get("pushed_bytes", 0)
        return finished

    def report(self) -> dict[str, Any]:
        """Return what tests look at from outside."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "free": pool.get_num_free_blocks(),
            "requests": sorted(self.scheduler.requests),
            "loading": sorted(
                name
                for name, request in self.scheduler.requests.items()
                if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            ),
            "preempted": [
                name for name, request in self.scheduler.requests.items() if request.status == RequestStatus.PREEMPTED
            ],
            "steps": self.steps,
            "computed": self.computed,
            "transferred": self.transferred,
        }

    def metrics(self) -> str:
        """Return what Prometheus gets of all transfers so far."""
        registry = prometheus_client.CollectorRegistry()
        kinds = {
            kind: functools.partial(kind, registry=registry)
            for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
        }
        seen = type(self.workers[0]).build_prom_metrics(self.config, kinds, ["engine"], {0: ["0"]})
        for data in self.intervals:
            seen.observe(data, 0)
        return prometheus_client.generate_latest(registry).decode()

    def close(self) -> None:
        """Shut the connectors down as vLLM does."""
        self.scheduler.shutdown()
        for worker in self.workers:
            setattr(kv_transfer_state, AGENT, worker)
            kv_transfer_state.ensure_kv_transfer_shutdown()
        self._current.close()

    def _worker(self, rank: int, ranks: int, cache_config: Any) -> Any:
        """Make a worker's connector as its process would, whose rank vLLM looks up in its group."""
        setattr(kv_transfer_state, AGENT, None)
        kv_transfer_state.ensure_kv_transfer_initialized(self.config, cache_config)
        worker, group = kv_transfer_state.get_kv_transfer_group(), parallel_state._TP
        if ranks > 1:
            setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=rank, world_size=ranks))  # noqa: B010
        worker.register_kv_caches(self.caches[rank])
        setattr(parallel_state, "_TP", group)  # noqa: B010
        return worker

    def _execute(self, scheduled: Any) -> Any:
        outputs = []
        for rank, worker in enumerate(self.workers):
            setattr(kv_transfer_state, AGENT, worker)
            outputs.append(self._execute_rank(scheduled, rank, worker))
        if not scheduled.total_num_scheduled_tokens:
            return self.gathered.aggregate(outputs)
        names, tokens = list(scheduled.num_scheduled_tokens), []
        for name in names:
            request, count = self.scheduler.requests[name], self._end(scheduled, name)
            layers = [[caches[layer] for caches in self.caches] for layer in self.caches[0]]
            done = count == request.num_tokens
            tokens.append([model.next_token(layers, self._table(name), count)] if done else [])
        outputs[0].sampled_token_ids = tokens
        return self.gathered.aggregate(outputs)

    def _execute_rank(self, scheduled: Any, rank: int, worker: Any) -> Any:
        if not scheduled.total_num_scheduled_tokens:
            output = KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
            return output if output is not EMPTY_MODEL_RUNNER_OUTPUT else ModelRunnerOutput([], {})
        if scheduled.preempted_req_ids:
            worker.handle_preemptions(scheduled.kv_connector_metadata)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as connected,
        ):
            self._forward(scheduled, rank, worker)
        names = list(scheduled.num_scheduled_tokens)
        positions = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, positions, [], kv_connector_output=connected)

    def _forward(self, scheduled: Any, rank: int, worker: Any) -> None:
        first_head = model.heads_of(rank, len(self.workers)).start
        for layer, (name, cache) in enumerate(self.caches[rank].items()):
            worker.wait_for_layer_load(name)
            for request_name in scheduled.num_scheduled_tokens:
                first, end = self._first(scheduled, request_name), self._end(scheduled, request_name)
                tokens = list(self.scheduler.requests[request_name].all_token_ids[first:end])
                model.fill(cache, layer, self._table(request_name), first, tokens, first_head)
            worker.save_kv_layer(name, cache, None)

    def _first(self, scheduled: Any, name: str) -> int:
        return self._end(scheduled, name) - int(scheduled.num_scheduled_tokens[name])

    def _end(self, scheduled: Any, name: str) -> int:
        return int(self.scheduler.requests[name].num_computed_tokens)  # the scheduler has advanced it already

    def _table(self, name: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def _observe(self, data: dict[str, Any]) -> None:
        self.intervals.append(data)
        for key, value in data.items():
            count = sum(one for one in value if not isinstance(one, dict)) if isinstance(value, list) else value
            self.transferred[key] = self.transferred.get(key, 0) + count


def serve(pipe: Connection, settings: dict[str, Any], environment: dict[str, str]) -> None:
    """Be an engine until the pipe ends; every command is answered once, finished requests come by themselves."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the model has the same name in all engines: connectors compare it
        engine = Engine(Path("arithmetic"), **settings)
        pipe.send({"ready": True})
        while _take(pipe, engine):
            if engine.busy:
                for finished in engine.step():
                    pipe.send({"finished": finished})
        engine.close()
    os._exit(0)


def _take(pipe: Connection, engine: Engine) -> bool:
    """Answer the calls that are here; wait for one where no step is due. Return False at the end of the pipe."""
    patience = 0.001 if engine.busy else None
    while pipe.poll(patience):
        try:
            do, arguments = pipe.recv()
        except EOFError:
            return False
        pipe.send({"answer": getattr(engine, do)(*arguments)})
        patience = 0
    return True

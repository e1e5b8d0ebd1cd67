"""One vLLM engine in a process of its own, which runs requests that another process sends through a pipe.

Started by vllm_pair.py. While no request is here the engine goes on stepping as long as it holds blocks for others.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asyncfabric.observe.spans import Span
from asyncfabric.observe.trace import Recording

MODEL_FOLDER = "/tmp/asyncfabric-vllm-model"
LONG_STEP_NS = 1_000_000  # a step without a forward pass takes less
IDLE_S = 0.05  # how long an engine without work waits for requests: engines beside it need the cores
LEASE_S = 12  # after which blocks that a killed engine has not read are free
STOCK = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
}
OURS = {
    "kv_connector": "Connector",
    "kv_connector_module_path": "asyncfabric.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"lease_s": LEASE_S},
}
CONNECTORS: dict[str, dict[str, Any]] = {"connector": OURS, "face": STOCK, "nixl": STOCK, "none": {}}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}
MODULES = ("vllm.v1.engine.async_llm", "vllm.v1.engine.core")
"""What vLLM itself imports before it forks; none of it initialises CUDA."""


@dataclasses.dataclass
class Job:
    """A request: a prompt, how many tokens to generate, where its KvCache comes from or goes, when it begins.

    `likely` asks for the logarithms of the probabilities of so many tokens in place of each that is generated;
    `allowed` are the tokens that may be, None for all.
    """

    prompt: list[int]
    count: int
    params: dict[str, Any] | None = None
    after_s: float = 0.0
    likely: int | None = None
    allowed: list[int] | None = None


@dataclasses.dataclass
class Done:
    """A request that has ended: its tokens, what vLLM passes on, when each came, and when its run had begun."""

    tokens: list[int]
    params: dict[str, Any] | None
    times: list[float]
    begun_at: float
    likely: list[dict[int, float]]

    @property
    def first_at(self) -> float:
        """When the first token came."""
        return self.times[0]


def make_model(vocabulary: int = 32000, *, weights: bool = False) -> None:
    """Write the configuration of a Llama of 22 layers, whose weights vLLM makes at random.

    Each worker makes its own: engines of different numbers of workers have one model only with `weights` in the folder.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    os.makedirs(MODEL_FOLDER, exist_ok=True)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        architectures=["LlamaForCausalLM"],
        torch_dtype="bfloat16",
    )
    config.save_pretrained(MODEL_FOLDER)
    there = _weights()
    if weights and not there:
        torch.manual_seed(1)
        torch.set_default_dtype(torch.bfloat16)
        LlamaForCausalLM(config).save_pretrained(MODEL_FOLDER)
        torch.set_default_dtype(torch.float32)
    for path in () if weights else there:
        path.unlink()


def _weights() -> list[Path]:
    return list(Path(MODEL_FOLDER).glob("*.safetensors"))


class Engine:
    """vLLM in this process."""

    def __init__(self, connector: dict[str, Any], workers: int) -> None:
        """Start with a connector, or without one; engines that start at once do not count each other's memory.

        Several workers are tensor parallel, each a process on a GPU of its own, the first one on the first GPU.
        """
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self._vllm = LLM(
            model=MODEL_FOLDER,
            load_format="auto" if _weights() else "dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=3 << 30,
            max_model_len=32768,
            max_num_batched_tokens=16384,
            dtype="bfloat16",
            enable_prefix_caching=False,
            tensor_parallel_size=workers,
            disable_custom_all_reduce=True,  # it tries for half a minute which GPUs reach each other
            kv_transfer_config=KVTransferConfig(kv_buffer_device="cuda", **connector) if connector else None,
        ).llm_engine
        self._scheduler = self._vllm.engine_core.engine_core.scheduler
        self._names = itertools.count()
        self._spans: list[Span] | None = None

    def free_blocks(self) -> int:
        """Return how many blocks no request has."""
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def busy(self) -> bool:
        """Return whether a step has anything to do."""
        return bool(self._scheduler.has_requests())

    def step(self) -> list[Any]:
        """Run one step, if there is any work."""
        if not self.busy():
            return []
        begin = time.monotonic_ns()
        outputs: list[Any] = self._vllm.step()
        if self._spans is not None and (outputs or time.monotonic_ns() - begin > LONG_STEP_NS):
            self._spans.append(Span(name="step", begin_ns=begin, end_ns=time.monotonic_ns()))
        return outputs

    def begin_trace(self) -> None:
        """Record steps, and what the connector's fabric does."""
        self._spans = []
        self._fabric().set_trace(True)

    def take_trace(self, name: str) -> Recording:
        """Return what was recorded, and stop."""
        fabric, spans = self._fabric(), self._spans or []
        self._spans = None
        fabric.set_trace(False)
        return Recording.here(name, fabric.take_trace(), spans)

    def _fabric(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._working.fabric

    def run(self, jobs: list[Job]) -> list[Done]:
        """Run requests, each from its time on; return them in their order."""
        from vllm import SamplingParams

        begin = time.monotonic()
        order: dict[str, int] = {}
        ended: dict[int, Done] = {}
        times: dict[str, list[float]] = {}
        waiting = sorted(range(len(jobs)), key=lambda number: jobs[number].after_s)
        while len(ended) < len(jobs):
            while waiting and time.monotonic() - begin >= jobs[waiting[0]].after_s:
                job, name = jobs[waiting[0]], str(next(self._names))
                order[name] = waiting.pop(0)
                extra = {"kv_transfer_params": dict(job.params)} if job.params else None
                sampling = SamplingParams(
                    temperature=0,
                    max_tokens=job.count,
                    detokenize=False,
                    ignore_eos=True,
                    extra_args=extra,
                    logprobs=job.likely,
                    allowed_token_ids=job.allowed,
                )
                self._vllm.add_request(name, {"prompt_token_ids": job.prompt}, sampling)
            for output in self.step():
                now = time.monotonic()
                tokens = list(output.outputs[0].token_ids)
                came = times.setdefault(output.request_id, [])
                came += [now] * (len(tokens) - len(came))
                if output.finished:
                    found = output.outputs[0].logprobs or []
                    likely = [{token: each.logprob for token, each in place.items()} for place in found]
                    ended[order[output.request_id]] = Done(
                        tokens, output.kv_transfer_params, came or [now], begin, likely
                    )
        return [ended[number] for number in range(len(jobs))]


def serve(name: str, environment: dict[str, str], mode: str, workers: int, pipe: Connection) -> None:
    """Run an engine with one of CONNECTORS until the pipe closes."""
    os.environ.update(ENVIRONMENT | environment)
    if mode == "face":
        from asyncfabric.integrations import nixl

        nixl.install()
    try:
        engine = Engine(CONNECTORS[mode], workers)
        pipe.send(engine.free_blocks())
        while True:
            if not pipe.poll(0 if engine.busy() else IDLE_S):
                engine.step()
                continue
            asked = pipe.recv()
            if asked == "free blocks":
                pipe.send(engine.free_blocks())
            elif asked == "begin trace":
                engine.begin_trace()
                pipe.send(None)
            elif asked == "take trace":
                pipe.send(engine.take_trace(name))
            else:
                pipe.send(engine.run(asked))
    except EOFError:
        pass
    except BaseException:
        text = f"engine {name}: {traceback.format_exc()}"
        print(text, flush=True)
        pipe.send(RuntimeError(text))
    os._exit(0)  # vLLM may take minutes to shut down

"""A vLLM engine in a process of its own that generates without a pause, and takes weights when the other process calls.

Spawned by vllm_weights.py. Calls come through a pipe between two steps; a call of a worker method stops generation, as
in a server. The times of steps are on the clock that processes of one machine share.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import types
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

FOLDER = "/tmp/asyncfabric-vllm-weights-model"
REQUESTS, STEPS = 8, 6000
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # else NCCL refuses two processes on one GPU
}
Shapes = Sequence[tuple[str, tuple[int, ...]]]


def prepare() -> None:
    """Set the environment, and let modules of vLLM be imported that name Ray, which is not used here."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("ray", "requests"):
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = types.ModuleType(name)


def model_config(layers: int) -> Any:
    """Return the configuration of a Llama with about 0.41 GiB a layer in bfloat16, and 0.69 GiB besides."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=45056,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )


def weight(number: int, shape: tuple[int, ...], version: int) -> torch.Tensor:
    """Return the weight of a version that stands at a place among all: both processes make the same bits."""
    generator = torch.Generator("cuda").manual_seed(10_000 * version + number)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02


def use_backend(worker: Any, backend: str) -> None:
    """Give a worker of vLLM the engine of a backend, as it makes one when it loads its model."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    worker = getattr(worker, "worker", worker)
    if worker.weight_transfer_engine is not None:
        worker.weight_transfer_engine.shutdown()
    worker._weight_update_active = False
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), worker.vllm_config, worker.device, worker.model_runner.get_model()
    )


def differences(worker: Any, shapes: Shapes, version: int) -> list[str]:
    """Return the parameters of a worker that are not those of a version, bit for bit."""
    worker = getattr(worker, "worker", worker)
    numbers = {name: (number, shape) for number, (name, shape) in enumerate(shapes)}
    wrong = []
    for name, found in worker.model_runner.get_model().named_parameters():
        root, last = name.rsplit(".", 1)
        front, dot, kind = root.rpartition(".")
        parts = [f"{front}{dot}{part}.{last}" for part in FUSED.get(kind, (kind,))]
        wanted = torch.cat([weight(*numbers[part], version) for part in parts])
        if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
            wrong.append(name)
    return wrong


class Generating:
    """The engine, and when each of its steps ended."""

    def __init__(self, graphs: bool) -> None:
        """Start; `graphs`: decode by CUDA graphs."""
        from vllm import LLM

        graph: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [REQUESTS]}
        self._llm = LLM(
            model=FOLDER,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=not graphs,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=8 << 30,
            max_model_len=8192,
            max_num_seqs=REQUESTS,
            dtype="bfloat16",
            enable_prefix_caching=False,
            async_scheduling=False,
            **({"compilation_config": graph} if graphs else {}),
        )
        self._begun = 0
        self.ended: list[float] = []

    def step(self) -> None:
        """Run a step; there is always work."""
        engine = self._llm.llm_engine
        while not engine.has_unfinished_requests():
            self._begin()
        if engine.step():
            self.ended.append(time.monotonic())

    def call(self, method: Any, arguments: tuple[Any, ...]) -> Any:
        """Call all workers, of which there is one."""
        return self._llm.collective_rpc(method, args=arguments)[0]

    def _begin(self) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=STEPS, detokenize=False, ignore_eos=True)
        for _ in range(REQUESTS):
            self._begun += 1
            prompt = [(7 * self._begun + place) % 30000 for place in range(16)]
            self._llm.llm_engine.add_request(str(self._begun), {"prompt_token_ids": prompt}, sampling)


def serve(pipe: Connection, graphs: bool) -> None:
    """Generate, and answer calls between steps, until the pipe closes."""
    try:
        prepare()
        from asyncfabric.integrations.vllm_weights import register

        register()
        engine = Generating(graphs)
        for _ in range(50):
            engine.step()
        pipe.send(True)
        while True:
            engine.step()
            while pipe.poll(0):
                method, *arguments = pipe.recv()
                try:
                    if method == "steps":
                        pipe.send(list(engine.ended))
                    elif method == "backend":
                        pipe.send(engine.call(use_backend, tuple(arguments)))
                    elif method == "differences":
                        pipe.send(engine.call(differences, tuple(arguments)))
                    else:
                        pipe.send(engine.call(method, tuple(arguments)))
                except Exception as error:
                    traceback.print_exc()
                    pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    except EOFError:
        pass
    except BaseException:
        text = traceback.format_exc()
        print(text, flush=True)
        pipe.send(RuntimeError(text))
    os._exit(0)  # vLLM may take minutes to shut down

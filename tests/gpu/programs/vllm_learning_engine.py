"""The vLLM engine of vllm_learning.py, in a process of its own: it answers prompts, takes weights, and states digests.

Calls come through a pipe, one after the other.
"""

from __future__ import annotations

import hashlib
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm_weights_engine import prepare, use_backend

VOCABULARY, PROMPT_TOKENS, NEW_TOKENS = 2048, 8, 16
GROUPS, EACH = 16, 8
"""Prompts of a step, and answers to each, which are compared with one another."""
PROBES, PROBE_TOKENS, PROBE_ANSWER = 8, 40, 4


def watch_logits(worker: Any) -> None:
    """Have a worker of vLLM keep the logits that its model computes."""
    worker = getattr(worker, "worker", worker)
    model = worker.model_runner.get_model()
    computed, kept = model.compute_logits, []

    def watched(*arguments: Any, **named: Any) -> Any:
        found = computed(*arguments, **named)
        kept.append(found.detach().clone())
        return found

    model.compute_logits, model.kept_logits = watched, kept


def forget_logits(worker: Any) -> None:
    """Drop the logits that were kept."""
    getattr(worker, "worker", worker).model_runner.get_model().kept_logits.clear()


def digests(worker: Any) -> tuple[str, str]:
    """Return digests of the worker's parameters, and of the logits that were kept."""
    model = getattr(worker, "worker", worker).model_runner.get_model()
    parameters = [each for _, each in sorted(model.named_parameters())]
    return digest_of(parameters), digest_of(model.kept_logits)


def digest_of(tensors: list[torch.Tensor]) -> str:
    """Return a digest of all bits."""
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def load_usual(worker: Any, path: str) -> None:
    """Load a checkpoint by vLLM's own loader."""
    from safetensors.torch import load_file

    worker = getattr(worker, "worker", worker)
    worker.model_runner.reload_weights(weights_iterator=iter(load_file(path).items()))


class AnsweringEngine:
    """The engine: what it is asked for."""

    def __init__(self, folder: str, graphs: bool) -> None:
        """Load the model of a folder."""
        from vllm import LLM

        graph: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 128]}
        self._llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=not graphs,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=1 << 30,
            max_model_len=256,
            max_num_seqs=GROUPS * EACH,
            dtype="bfloat16",
            enable_prefix_caching=False,
            async_scheduling=False,
            **({"compilation_config": graph} if graphs else {}),
        )
        self._llm.collective_rpc(use_backend, args=("asyncfabric",))
        self._llm.collective_rpc(watch_logits)

    def generate(self, seed: int) -> list[list[int]]:
        """Return prompts with answers that are drawn from the model, GROUPS * EACH rows."""
        from vllm import SamplingParams

        dice = torch.Generator().manual_seed(seed)
        groups = torch.randint(VOCABULARY, (GROUPS, PROMPT_TOKENS), generator=dice).tolist()
        prompts = [list(one) for one in groups for _ in range(EACH)]
        drawn = [
            SamplingParams(
                temperature=1.0, seed=seed * 1000 + row, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True
            )
            for row in range(len(prompts))
        ]
        self._llm.collective_rpc(forget_logits)
        return [prompt + answer for prompt, answer in zip(prompts, self._answers(prompts, drawn), strict=True)]

    def digests(self) -> tuple[str, str]:
        """Return digests of all parameters, and of the logits of a few prompts and of the first tokens behind them."""
        from vllm import SamplingParams

        self._llm.collective_rpc(forget_logits)
        prompts = [[(13 * row + 7 * place) % VOCABULARY for place in range(PROBE_TOKENS)] for row in range(PROBES)]
        greedy = SamplingParams(temperature=0, max_tokens=PROBE_ANSWER, detokenize=False, ignore_eos=True)
        self._answers(prompts, [greedy] * len(prompts))
        found: tuple[str, str] = self._llm.collective_rpc(digests)[0]
        return found

    def usual(self, path: str) -> tuple[str, str]:
        """Load a checkpoint the usual way, and return its digests."""
        self._llm.collective_rpc(load_usual, args=(path,))
        return self.digests()

    def worker_call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the worker, as vLLM's client does."""
        return self._llm.collective_rpc(method, args=arguments)[0]

    def _answers(self, prompts: list[list[int]], sampling: list[Any]) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self._llm.generate(asked, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


def answer_calls(pipe: Connection, folder: str, graphs: bool) -> None:
    """Answer calls until the pipe closes."""
    try:
        prepare()
        from asyncfabric.integrations.vllm_weights import register

        register()
        engine = AnsweringEngine(folder, graphs)
        pipe.send(True)
        while True:
            method, *arguments = pipe.recv()
            try:
                if method in ("generate", "digests", "usual"):
                    pipe.send(getattr(engine, method)(*arguments))
                else:
                    pipe.send(engine.worker_call(method, tuple(arguments)))
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

"""An engine of vLLM as a training sees it: its routes, and workers whose weight transfer is vLLM's own `Worker`.

`engine_server.py FOLDER RANKS`. The routes are vLLM's router for trainings, over HTTP; the engine's client behind them
is this program's, and calls the methods of `vllm.v1.worker.gpu_worker.Worker` in RANKS processes. Those have tiny
models in place of a model runner, and compute nothing: completions are tokens at random. Prints {"port": ...}. These
routes are of the tests:

    POST /make {"family", "version"}       each worker makes a model, loads the checkpoint of a version, and its engine
    POST /differences {"version"}          what differs from a model that loads another version's checkpoint, by name
    POST /reload {"version"}               each worker loads the checkpoint of a version into its model, as vLLM reloads
    POST /calls                            the calls of trainings and their clients so far, in their order
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import random
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import Body, FastAPI, Request

VOCABULARY = 250  # of completions; every tiny model has more


class Engine:
    """What vLLM's routes call: each call goes to all workers, and ends when it has ended in all; `calls` names them."""

    def __init__(self, workers: list[Connection]) -> None:
        self.calls: list[str] = []
        self._workers = workers

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.call("init_weight_transfer_engine", request.init_info)

    async def start_weight_update(self) -> None:
        await self.call("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self.call("update_weights", request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self.call("finish_weight_update")

    async def shutdown_weight_transfer_engine(self) -> None:
        await self.call("shutdown_weight_transfer_engine")

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        self.calls.append(method)
        return await asyncio.to_thread(self._call, method, arguments)

    def _call(self, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        for worker in self._workers:
            worker.send((method, arguments))
        answers = [worker.recv() for worker in self._workers]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


class Making:
    """What one worker process makes and compares; `worker` is vLLM's, with the attributes that its methods read."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        from tiny_models import Ranks

        self._folder, self._rank = folder, rank
        self._ranks = Ranks(folder, rank, ranks)
        self.worker: Any = None

    def make(self, family: str, version: int) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.v1.worker.gpu_worker import Worker

        from asyncfabric.integrations.vllm_weights import register

        register()
        self._family = family
        wanted = WeightTransferConfig(backend="asyncfabric")
        options, model = self._loaded(version, weight_transfer_config=wanted)
        self._places = {name: each.data_ptr() for name, each in model.named_parameters()}
        self.worker = worker = object.__new__(Worker)
        worker.vllm_config, worker.model_config, worker.rank = options, options.model_config, self._rank
        worker.parallel_config, worker.speculative_config = options.parallel_config, None
        worker.model_runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            wanted, options, options.device_config.device, model
        )

    def differences(self, version: int) -> list[str]:
        import torch

        _, other = self._loaded(version)
        model = self.worker.model_runner.get_model()
        moved = [f"{name} moved" for name, each in model.named_parameters() if each.data_ptr() != self._places[name]]
        here, there = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (model, other))
        for module, twin in zip(model.modules(), other.modules(), strict=True):
            for name in ("W_UK_T", "W_UV"):  # of latent attention, made of other weights
                if hasattr(twin, name):
                    here[name], there[name] = getattr(module, name), getattr(twin, name)
        assert here.keys() == there.keys()
        return moved + [name for name in here if not torch.equal(here[name], there[name])]

    def reload(self, version: int) -> None:
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        checkpoint = load_file(self._folder / f"{self._family}-{version}" / "model.safetensors")
        model = self.worker.model_runner.get_model()
        with set_current_vllm_config(self.worker.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(checkpoint.items())
            finalize_layerwise_reload(model, self.worker.model_config)

    def _loaded(self, version: int, **more: Any) -> tuple[Any, Any]:
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        checkpoint = self._folder / f"{self._family}-{version}"
        options, model = self._ranks.model(checkpoint, **more)
        with set_current_vllm_config(options):
            model.load_weights(load_file(checkpoint / "model.safetensors").items())
            process_weights_after_loading(model, options.model_config, options.device_config.device)
        return options, model


def work(calls: Connection, folder: Path, rank: int, ranks: int) -> None:
    """Answer calls until the program ends: of `Making`, or of vLLM's worker."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that nobody has written holds NaN then
    making = Making(folder, rank, ranks)
    while True:
        try:
            method, arguments = calls.recv()
        except EOFError:
            os._exit(0)  # vLLM leaves groups and threads behind
        try:
            target = making if hasattr(making, method) else making.worker
            calls.send(getattr(target, method)(*arguments))
        except Exception as error:
            traceback.print_exc()  # pytest shows it where a test fails
            calls.send(RuntimeError(f"{type(error).__name__}: {error}"))


def router() -> Any:
    """Return vLLM's routes for trainings, of 0.33 or 0.26."""
    try:
        from vllm.entrypoints.rl.online.api_router import router as found
    except ImportError:
        from vllm.entrypoints.serve.dev.rlhf.api_router import router as found
    return found


async def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    context = multiprocessing.get_context("spawn")
    workers = []
    for rank in range(ranks):
        here, there = context.Pipe()
        context.Process(target=work, args=(there, folder, rank, ranks), daemon=True).start()
        workers.append(here)
        there.close()
    engine = Engine(workers)
    app = FastAPI()
    app.state.engine_client = engine
    app.include_router(router())

    @app.post("/make")
    async def make(family: str = Body(), version: int = Body()) -> None:
        await engine.call("make", family, version)

    @app.post("/differences")
    async def differences(version: int = Body(embed=True)) -> list[list[str]]:
        return await engine.call("differences", version)

    @app.post("/reload")
    async def reload(version: int = Body(embed=True)) -> None:
        await engine.call("reload", version)

    @app.post("/calls")
    async def calls() -> list[str]:
        return engine.calls

    @app.post("/reset_prefix_cache")
    async def reset() -> None:
        engine.calls.append("reset_prefix_cache")

    @app.post("/v1/completions")
    async def complete(request: Request) -> dict[str, list[Any]]:
        engine.calls.append("completions")
        asked = await request.json()
        likely = {"token_logprobs": [-math.log(VOCABULARY)] * asked["max_tokens"]}
        tokens = [random.choices(range(VOCABULARY), k=asked["max_tokens"]) for _ in asked["prompt"]]
        return {"choices": [{"index": at, "token_ids": each, "logprobs": likely} for at, each in enumerate(tokens)]}

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(json.dumps({"port": server.servers[0].sockets[0].getsockname()[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the test ends
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())

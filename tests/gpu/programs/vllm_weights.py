"""Weights of a training into a running vLLM engine on the same GPU: asyncfabric beside vLLM's own `ipc` and `nccl`.

Usage: python tests/gpu/programs/vllm_weights.py [--layers 18] [--turns 5] [--eager] [--backends asyncfabric,ipc,...]
Wants vLLM 0.26 and its packages; no network. Prints a line of JSON for each backend: the medians of the time until the
engine has generated with the new weights, and of the pause in its generation. Ends with 1 if any weight was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm_weights_engine import FOLDER, Shapes, model_config, prepare, serve, weight

START_S, ANSWER_S = 300.0, 90.0


class RemoteEngine:
    """The engine's process, which is also what vLLM's trainer halves call their client."""

    def __init__(self, program: Callable[..., None], *arguments: Any) -> None:
        """Start program(pipe, *arguments); returns when it generates."""
        spawning = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, there = spawning.Pipe()
        self.process = spawning.Process(target=program, args=(there, *arguments))
        self.process.start()
        there.close()
        self._answer(START_S)

    def call(self, *call: Any) -> Any:
        """Call it between two steps, and wait for the answer."""
        self._pipe.send(call)
        return self._answer(ANSWER_S)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See vLLM's client."""
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """See vLLM's client."""
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See vLLM's client."""
        self.call("update_weights", update_info)

    def finish_weight_update(self) -> None:
        """See vLLM's client."""
        self.call("finish_weight_update")

    def first_step_after(self, moment: float) -> tuple[float, list[float]]:
        """Return when the first step that began after a moment ended, and the ends of all steps so far."""
        while True:
            ended: list[float] = self.call("steps")
            later = [at for at in ended if at > moment]
            if len(later) >= 3:
                return later[0], ended
            time.sleep(0.01)

    def _answer(self, within_s: float) -> Any:
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"the engine has not answered within {within_s:g} s")
        found = self._pipe.recv()
        if isinstance(found, BaseException):
            raise found
        return found


def free_port() -> int:
    """Return a port that is free now; what listens there cannot be given 0."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Training:
    """A model whose weights follow from the number of a version."""

    def __init__(self, layers: int) -> None:
        """Make it on the GPU."""
        from transformers import LlamaForCausalLM

        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            self.model = LlamaForCausalLM(model_config(layers))
        torch.set_default_dtype(torch.float32)
        self.shapes: Shapes = [(name, tuple(each.shape)) for name, each in self.model.named_parameters()]

    @property
    def bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(each.nbytes for each in self.model.parameters())

    def change(self, version: int) -> None:
        """Have the weights of a version."""
        with torch.no_grad():
            for number, each in enumerate(self.model.parameters()):
                each.copy_(weight(number, tuple(each.shape), version))
        torch.cuda.synchronize()


Send = Callable[[], "dict[str, float]"]


def open_asyncfabric(training: Training, engine: RemoteEngine, stack: ExitStack, shadow: str) -> Send:
    """Return what sends all weights by asyncfabric; it reports how long publishing took."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from asyncfabric.integrations.vllm_weights import TrainerInit, register

    register()
    info = TrainerInit(rank=0, ranks=1, shadow=shadow)
    trainer: Any = WeightTransferTrainerFactory.trainer_init(
        "asyncfabric", None, info, client=engine, source=ModuleSource(training.model)
    )
    stack.callback(trainer.shutdown)

    def send() -> dict[str, float]:
        begun = time.monotonic()
        trainer.publish()
        published = time.monotonic()
        engine.start_weight_update()
        engine.update_weights(trainer.update_info)
        engine.finish_weight_update()
        return {"publish_ms": 1e3 * (published - begun), "calls_ms": 1e3 * (time.monotonic() - published)}

    return send


def open_ipc(training: Training, engine: RemoteEngine, stack: ExitStack, packed: bool) -> Send:
    """Return what sends all weights by vLLM's `ipc`."""
    from dataclasses import asdict

    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

    engine.init_weight_transfer_engine({})
    arguments = IPCTrainerSendWeightsArgs(
        send_mode=lambda update: engine.update_weights({**asdict(update), "ipc_handles_pickled": None}), packed=packed
    )

    def send() -> dict[str, float]:
        engine.start_weight_update()
        IPCWeightTransferEngine.trainer_send_weights(training.model.named_parameters(), arguments)
        engine.finish_weight_update()
        return {}

    return send


def open_nccl(training: Training, engine: RemoteEngine, stack: ExitStack, packed: bool) -> Send:
    """Return what sends all weights by vLLM's `nccl`."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

    where = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    caller = ThreadPoolExecutor(1)
    stack.callback(caller.shutdown, wait=False)
    joining = caller.submit(engine.init_weight_transfer_engine, {**where, "rank_offset": 1})
    group = NCCLWeightTransferEngine.trainer_init(where)
    joining.result(ANSWER_S)
    arguments = NCCLTrainerSendWeightsArgs(group=group, packed=packed)
    update = {
        "names": [name for name, _ in training.shapes],
        "dtype_names": ["bfloat16"] * len(training.shapes),
        "shapes": [list(shape) for _, shape in training.shapes],
        "packed": packed,
    }

    def send() -> dict[str, float]:
        engine.start_weight_update()
        receiving = caller.submit(engine.update_weights, update)
        NCCLWeightTransferEngine.trainer_send_weights(training.model.named_parameters(), arguments)
        torch.cuda.synchronize()
        receiving.result(ANSWER_S)
        engine.finish_weight_update()
        return {}

    return send


BACKENDS: dict[str, tuple[str, Callable[[Training, RemoteEngine, ExitStack], Send]]] = {
    "asyncfabric": ("asyncfabric", partial(open_asyncfabric, shadow="device")),
    "asyncfabric host": ("asyncfabric", partial(open_asyncfabric, shadow="host")),
    "ipc": ("ipc", partial(open_ipc, packed=False)),
    "ipc packed": ("ipc", partial(open_ipc, packed=True)),
    "nccl packed": ("nccl", partial(open_nccl, packed=True)),
    "nccl": ("nccl", partial(open_nccl, packed=False)),
}


def bare_copy_ms(training: Training, turns: int) -> float:
    """Return how long one copy of all bytes takes inside the GPU."""
    source = torch.zeros(training.bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(turns + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times[2:]))


def measure(training: Training, engine: RemoteEngine, send: Send, turns: int, first: int) -> dict[str, Any]:
    """Send several versions; return medians, and what was wrong after the last one."""
    total: list[float] = []
    pauses: list[float] = []
    parts: dict[str, list[float]] = {}
    for turn in range(-1, turns):  # the first is not counted
        training.change(first + turn + 1)
        begun = time.monotonic()
        found = send()
        returned = time.monotonic()
        first_at, ended = engine.first_step_after(returned)
        before = [at for at in ended if at < begun]
        around = [*before[-3:], *(at for at in ended if begun <= at <= first_at)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(around)]
        if turn >= 0:
            total.append(1e3 * (first_at - begun))
            pauses.append(1e3 * (max(gaps) - statistics.median(gaps)))
            for name, value in found.items():
                parts.setdefault(name, []).append(value)
    wrong = engine.call("differences", training.shapes, first + turns)
    return {
        "until_generated_ms": round(statistics.median(total), 2),
        "until_generated_all_ms": [round(one, 2) for one in total],
        "pause_ms": round(statistics.median(pauses), 2),
        "pause_all_ms": [round(one, 2) for one in pauses],
        "step_ms": round(1e3 * statistics.median(gaps), 2),
        **{name: round(statistics.median(values), 2) for name, values in parts.items()},
        "wrong": wrong,
    }


def main() -> int:
    """Measure all backends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    options = parser.parse_args()
    prepare()
    model_config(options.layers).save_pretrained(FOLDER)
    torch.cuda.set_device(0)
    training = Training(options.layers)
    bare = bare_copy_ms(training, options.turns)
    torch.cuda.empty_cache()
    card = torch.cuda.get_device_name()
    print(json.dumps({"bytes": training.bytes, "bare_copy_ms": round(bare, 3), "card": card}), flush=True)
    engine = RemoteEngine(serve, not options.eager)
    failed = 0
    for number, name in enumerate(options.backends.split(",")):
        backend, opened = BACKENDS[name]
        row: dict[str, Any] = {"bench": "vllm weights", "backend": name}
        try:
            engine.call("backend", backend)
            with ExitStack() as stack:
                send = opened(training, engine, stack)
                row |= measure(training, engine, send, options.turns, 100 * (number + 1))
            row["of_bare_copy"] = round(bare / row["until_generated_ms"], 3)
            failed += bool(row["wrong"])
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
            failed += name.startswith("asyncfabric")
        print(json.dumps(row), flush=True)
        if "error" in row and "TimeoutError" in row["error"]:
            break  # the engine hangs in a call
    sys.stdout.flush()
    engine.process.kill()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()

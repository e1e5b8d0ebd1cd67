"""The measured process: `python -m asyncfabric_services.bench.peer KIND SOCKET`.

Reads calls from stdin, answers on stdout. One call at a time, on a trio loop, until stdin ends. Prints of libraries
go to stderr: stdout belongs to the answers.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator

import trio

from asyncfabric_services.bench.worker import BenchWorker

WORKERS = {
    "limits": ("asyncfabric_services.bench.limits.limit_worker", "LimitWorker"),
    "fabric": ("asyncfabric_services.bench.transfers.fabric_worker", "FabricWorker"),
    "moe": ("asyncfabric_services.bench.moe.worker", "MoeWorker"),
    "moe-gpu": ("asyncfabric_services.bench.moe.gpu_worker", "MoeGpuWorker"),
    "kv": ("asyncfabric_services.bench.kv.worker", "KvWorker"),
    "engine": ("asyncfabric_services.bench.transfers.engine_worker", "EngineWorker"),
    "gpu": ("asyncfabric_services.bench.gpu.worker", "GpuWorker"),
    "gpu-limits": ("asyncfabric_services.bench.gpu.limit_worker", "GpuLimitWorker"),
    "ttft": ("asyncfabric_services.bench.kv.ttft_worker", "TtftWorker"),
    "weights": ("asyncfabric_services.bench.weights.worker", "WeightsWorker"),
    "weights-crowd": ("asyncfabric_services.bench.weights.crowd_worker", "CrowdWorker"),
    "mesh": ("asyncfabric_services.bench.transfers.mesh_worker", "MeshWorker"),
    "gpu-weights": ("asyncfabric_services.bench.weights.gpu_worker", "GpuWeightsWorker"),
    "nixl": ("asyncfabric_services.bench.nixl.worker", "NixlWorker"),
    "nixl-bare": ("asyncfabric_services.bench.nixl.bare_worker", "NixlBareWorker"),
    "notes": ("asyncfabric_services.bench.transfers.note_worker", "NoteWorker"),
    "scatter": ("asyncfabric_services.bench.transfers.scatter_worker", "ScatterWorker"),
}

PR_SET_PDEATHSIG = 1


async def lines(descriptor: int) -> AsyncIterator[bytes]:
    """Yield lines until the other end closes."""
    async with trio.lowlevel.FdStream(descriptor) as stream:
        buffer = b""
        async for block in stream:
            buffer += block
            while b"\n" in buffer:
                line, _, buffer = buffer.partition(b"\n")
                yield line


def write_all(descriptor: int, data: bytes) -> None:
    """Write a whole answer; blocks, since nothing is measured between two calls."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


async def answer(worker: BenchWorker, line: bytes) -> bytes:
    """Do one call and return its answer as a line; an error is an answer too."""
    request = json.loads(line)
    try:
        reply = {"value": await worker.call(request["command"], request["arguments"])}
    except Exception as error:
        reply = {"error": str(error), "class": type(error).__name__, "traceback": traceback.format_exc()}
    return json.dumps(reply).encode() + b"\n"


async def serve(kind: str, meeting: int, calls: int, answers: int) -> None:
    """Serve calls until the coordinator closes its end."""
    module, name = WORKERS[kind]
    worker: BenchWorker = getattr(importlib.import_module(module), name)(meeting)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.beside)
            async for line in lines(calls):
                write_all(answers, await answer(worker, line))
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await worker.aclose()


def main() -> None:
    """Run one measured process."""
    # Dies with the coordinator, also when that is killed while a native loop runs here and nobody reads stdin.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the coordinator decides
    calls, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    trio.run(serve, sys.argv[1], int(sys.argv[2]), calls, answers)


if __name__ == "__main__":
    main()

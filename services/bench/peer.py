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

from asyncfabric_services.bench.station import Station

STATIONS = {
    "limits": ("asyncfabric_services.bench.limit_station", "LimitStation"),
    "fabric": ("asyncfabric_services.bench.fabric_station", "FabricStation"),
    "moe": ("asyncfabric_services.bench.moe_station", "MoeStation"),
    "moe-gpu": ("asyncfabric_services.bench.moe_gpu_station", "MoeGpuStation"),
    "kv": ("asyncfabric_services.bench.kv_station", "KvStation"),
    "engine": ("asyncfabric_services.bench.engine_station", "EngineStation"),
    "gpu": ("asyncfabric_services.bench.gpu_station", "GpuStation"),
    "gpu-limits": ("asyncfabric_services.bench.gpu_limit_station", "GpuLimitStation"),
    "ttft": ("asyncfabric_services.bench.ttft_station", "TtftStation"),
    "weights": ("asyncfabric_services.bench.weights_station", "WeightsStation"),
    "weights-crowd": ("asyncfabric_services.bench.crowd_station", "CrowdStation"),
    "mesh": ("asyncfabric_services.bench.mesh_station", "MeshStation"),
    "gpu-weights": ("asyncfabric_services.bench.gpu_weights_station", "GpuWeightsStation"),
    "nixl": ("asyncfabric_services.bench.nixl_station", "NixlStation"),
    "nixl-bare": ("asyncfabric_services.bench.nixl_bare_station", "NixlBareStation"),
    "notes": ("asyncfabric_services.bench.note_station", "NoteStation"),
    "scatter": ("asyncfabric_services.bench.scatter_station", "ScatterStation"),
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


async def answer(station: Station, line: bytes) -> bytes:
    """Do one call and return its answer as a line; an error is an answer too."""
    request = json.loads(line)
    try:
        reply = {"value": await station.call(request["command"], request["arguments"])}
    except Exception as error:
        reply = {"error": str(error), "class": type(error).__name__, "traceback": traceback.format_exc()}
    return json.dumps(reply).encode() + b"\n"


async def serve(kind: str, meeting: int, calls: int, answers: int) -> None:
    """Serve calls until the coordinator closes its end."""
    module, name = STATIONS[kind]
    station: Station = getattr(importlib.import_module(module), name)(meeting)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(station.beside)
            async for line in lines(calls):
                write_all(answers, await answer(station, line))
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await station.aclose()


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

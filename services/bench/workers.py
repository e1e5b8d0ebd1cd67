"""The kinds of measured processes, by name; messages between them and the coordinator. Imports no worker."""

from __future__ import annotations

from typing import Any

import msgspec

WORKERS = {
    "limits": "limits.limit_worker:LimitWorker",
    "fabric": "transfers.fabric_worker:FabricWorker",
    "engine": "transfers.engine_worker:EngineWorker",
    "scatter": "transfers.scatter_worker:ScatterWorker",
    "mesh": "transfers.mesh_worker:MeshWorker",
    "notes": "transfers.note_worker:NoteWorker",
    "gpu": "gpu.worker:GpuWorker",
    "gpu-limits": "gpu.limit_worker:GpuLimitWorker",
    "kv": "kv.worker:KvWorker",
    "kv-gpu": "kv.gpu_worker:GpuKvWorker",
    "ttft": "kv.ttft_worker:TtftWorker",
    "moe": "moe.worker:MoeWorker",
    "moe-gpu": "moe.gpu_worker:MoeGpuWorker",
    "nixl": "nixl.worker:NixlWorker",
    "nixl-bare": "nixl.bare_worker:NixlBareWorker",
    "weights": "weights.worker:WeightsWorker",
    "weights-crowd": "weights.crowd_worker:CrowdWorker",
    "gpu-weights": "weights.gpu_worker:GpuWeightsWorker",
}
"""Kind of a measured process -> module under asyncfabric_services.bench, and class."""


class WorkerCall(msgspec.Struct, tag=True, frozen=True):
    """What the coordinator asks: the method `do_<command>` of the worker."""

    command: str
    arguments: dict[str, Any]


class Value(msgspec.Struct, tag=True, frozen=True):
    """A call was done, and returned this."""

    value: Any


class Failure(msgspec.Struct, tag=True, frozen=True):
    """A call raised an exception of this class; the process goes on."""

    error: str
    kind: str
    traceback: str

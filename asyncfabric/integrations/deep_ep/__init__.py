"""The interface of DeepEP over `asyncfabric.moe`, for host tensors over any rail and for GPU tensors. No logic here.

    from asyncfabric.integrations import deep_ep
    buffer = deep_ep.Buffer(group, num_rdma_bytes=..., low_latency_mode=True)

`install()` has `import deep_ep` find it in this process; `pythonpath()` is a folder that does so on PYTHONPATH. What is
the same, different and refused: docs/guide/moe.md. `training` has functions over a Buffer that torch differentiates.
"""

import torch

from asyncfabric.integrations.deep_ep import training
from asyncfabric.integrations.deep_ep.buffer import Buffer, DispatchHandle
from asyncfabric.integrations.deep_ep.elastic import ElasticBuffer
from asyncfabric.integrations.deep_ep.elastic_handle import EPHandle
from asyncfabric.integrations.deep_ep.events import EventHandle, EventOverlap
from asyncfabric.integrations.deep_ep.gpu_dispatch import GpuDispatchHandle
from asyncfabric.integrations.deep_ep.gpu_low_latency import GpuLowLatencyHandle
from asyncfabric.integrations.deep_ep.installing import install, pythonpath, uninstall
from asyncfabric.integrations.deep_ep.low_latency import LowLatencyHandle
from asyncfabric.integrations.deep_ep.tuning import Config

topk_idx_t: torch.dtype = torch.int64
"""What callers make their experts' numbers; int32 is taken as well."""

__all__ = [
    "Buffer",
    "Config",
    "DispatchHandle",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "GpuDispatchHandle",
    "GpuLowLatencyHandle",
    "LowLatencyHandle",
    "install",
    "pythonpath",
    "topk_idx_t",
    "training",
    "uninstall",
]

"""What differs between vLLM 0.26 and 0.33, and every name of vLLM that the other files need."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.request import RequestStatus

__all__ = [
    "REPORTS_REQUESTS",
    "FullAttentionSpec",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "RequestStatus",
    "SupportsHMA",
    "create_metric_per_engine",
    "transfer_results",
]

REPORTS_REQUESTS: bool = hasattr(base, "KVConnectorTransferResults")
"""Whether failed loads are reported by request (0.33) and not by block (0.26)."""


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """Return what `get_transfer_results` of 0.33 returns."""
    return base.KVConnectorTransferResults(sent, received, failed)

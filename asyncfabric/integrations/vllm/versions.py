"""What differs between vLLM 0.26 and 0.33, and every name of vLLM that the other files need.

For type checkers its classes are declared as far as they are used here: vLLM is not installed where types are checked,
and a base class of unknown type would hide that of every member.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    base: Any

    class KVConnectorMetadata:
        """What the scheduler's side sends to the workers with a step."""

    class KVConnectorHandshakeMetadata:
        """What a worker sends to the scheduler's side once."""

    class KVConnectorRole(Enum):
        """The side that a connector serves."""

        SCHEDULER = 0
        WORKER = 1

    class SupportsHMA:
        """Marks connectors that free the blocks of several groups."""

    class KVConnectorBase_V1:  # noqa: N801
        """The interface of a connector."""

        _kv_transfer_config: Any

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None: ...

        def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
            """Give the worker's side the metadata of a step."""

        def _get_connector_metadata(self) -> KVConnectorMetadata: ...

    class KVConnectorStats:
        """Statistics of one interval."""

        data: dict[str, Any]

        def __init__(self, data: dict[str, Any]) -> None: ...

    class KVConnectorPromMetrics:
        """Metrics for Prometheus."""

        _counter_cls: Any
        _histogram_cls: Any
        per_engine_labelvalues: dict[int, list[object]]

        def __init__(self, *args: Any) -> None: ...

    class FullAttentionSpec:
        """A group of layers that attend to all tokens."""

        block_size: int

    class MLAAttentionSpec(FullAttentionSpec):
        """Such a group that keeps one latent for all heads."""

    RequestStatus: Any
    create_metric_per_engine: Any
else:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
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
    "MLAAttentionSpec",
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

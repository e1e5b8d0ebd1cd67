"""What the scheduler's side of the connector sends to the workers with each step; pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncfabric.integrations.vllm.messages import Source
from asyncfabric.integrations.vllm.versions import KVConnectorHandshakeMetadata, KVConnectorMetadata


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """The address of a worker's fabric, from the worker to the scheduler's side; `order`: Split.order."""

    address: bytes
    order: str = ""


@dataclass
class Computing:
    """A request that this step computes for another engine: all its blocks so far, and the tokens they hold then."""

    request: str
    transfer: str
    blocks: list[int]
    end: int
    total: int


@dataclass
class Loading:
    """A request whose blocks from `first` on another engine pushes."""

    request: str
    source: Source
    first: int
    blocks: list[int]


@dataclass
class ConnectorStep(KVConnectorMetadata):
    """One step.

    Attributes:
        computing: what save_kv_layer pushes.
        loading: loads to begin.
        held: finished requests whose blocks are kept until they are pushed, and whether they were aborted.
        cancelled: requests that were loading and are not wanted any more.
        unwanted: transfers of requests that were never given blocks here.
        preempted: requests whose blocks are about to be overwritten.
    """

    computing: list[Computing] = field(default_factory=list)
    loading: list[Loading] = field(default_factory=list)
    held: dict[str, bool] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    unwanted: list[Source] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

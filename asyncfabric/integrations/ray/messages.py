"""What travels with an object from the actor that made it to those that read it; pickled by Ray.

Values, any thread.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

import ray

from asyncfabric.integrations.ray.interface import CommunicatorMetadata, TensorTransportMetadata


@dataclass(eq=False)
class SourceMetadata(TensorTransportMetadata):
    """Where the tensors of an object are.

    Attributes:
        address: bytes of the fabric that owns them; empty for an object without tensors.
        keys: for each tensor the bytes of a key to read exactly it; empty for a tensor without elements.
        source: the process that has them, for error texts.
    """

    address: bytes = b""
    keys: list[bytes] = field(default_factory=list)
    source: str = ""


@dataclass
class ReadMetadata(CommunicatorMetadata):
    """Nothing: whoever reads needs only the metadata of the source."""


def this_process() -> str:
    """Return the name of this process in error texts: its actor, its number and its host."""
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    name = context.get_actor_name() if actor else ""
    who = f"actor {name} {actor}" if name else f"actor {actor}" if actor else "driver"
    return f"{who} (process {os.getpid()} on {socket.gethostname()})"

"""The classes of Ray that the transport derives from, declared for type checkers as far as they are used here.

Ray is not installed where types are checked, and a base class of unknown type would hide that of every member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass

    @dataclass
    class CommunicatorMetadata:
        """What both sides of a transfer know about their connection."""

    @dataclass
    class TensorTransportMetadata:
        """What a receiver knows of the tensors of an object: shapes with dtypes, and the kind of their device."""

        tensor_meta: list[Any]
        tensor_device: str | None = None

    @dataclass
    class FetchRequest:
        """A fetch that Ray waits for, with the tensors that it fills."""

        obj_id: str
        tensors: list[Any]

    class TensorTransportManager:
        """The interface of a transport."""

else:
    from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
    from ray.experimental.rdt.tensor_transport_manager import FetchRequest

__all__ = ["CommunicatorMetadata", "FetchRequest", "TensorTransportManager", "TensorTransportMetadata"]

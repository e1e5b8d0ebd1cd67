"""Calls of NIXL that the face refuses by name: its listener for metadata, and memory views for kernels.

Any thread; each raises at once.
"""

from __future__ import annotations

from asyncfabric.integrations.nixl.agent_config import DEFAULT_COMM_PORT
from asyncfabric.integrations.nixl.errors import nixlNotSupportedError

NO_LISTENER = (
    "asyncfabric offers no listener for metadata: take it from get_agent_metadata(), carry it as your program carries "
    "other messages, and give it to add_remote_agent()"
)


class RefusedCalls:
    """Methods of nixl_agent that raise nixlNotSupportedError."""

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Raise nixlNotSupportedError: the face has no listener."""
        raise nixlNotSupportedError(NO_LISTENER)

    def send_partial_agent_metadata(self, *arguments: object, **named: object) -> None:
        """Raise nixlNotSupportedError: the face has no listener."""
        raise nixlNotSupportedError(NO_LISTENER)

    def fetch_remote_metadata(self, *arguments: object, **named: object) -> None:
        """Raise nixlNotSupportedError: the face has no listener."""
        raise nixlNotSupportedError(NO_LISTENER)

    def invalidate_local_metadata(self, *arguments: object, **named: object) -> None:
        """Raise nixlNotSupportedError: the face has no listener."""
        raise nixlNotSupportedError(NO_LISTENER)

    def prep_mem_view(self, dlist: object, *, backends: list[str] | None = None) -> int:
        """Raise nixlNotSupportedError: there are no memory views for kernels."""
        raise nixlNotSupportedError("memory views for kernels are not offered; transfers are posted by the CPU")

    def release_mem_view(self, mvh: int) -> None:
        """Raise nixlNotSupportedError, as prep_mem_view() does."""
        raise nixlNotSupportedError("memory views for kernels are not offered")

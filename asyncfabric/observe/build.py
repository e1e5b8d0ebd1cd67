"""What this build of asyncfabric can open. Any thread; nothing is opened."""

from __future__ import annotations

from asyncfabric._bridge.native import native_providers


def built_providers() -> frozenset[str]:
    """Return the names of the providers that were compiled in, whether or not their library and hardware are here."""
    return native_providers()

"""`asyncfabric demo`: two real processes move the KvCache of a real transformers model. See README.md.

The command is imported lazily, so that the modules that run in the children do not load what only the parent needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncfabric_services.demo.command import demo_command, run_demo

__all__ = ["demo_command", "run_demo"]


def __getattr__(name: str) -> Any:
    """Return the click command or the function behind it."""
    if name in __all__:
        from asyncfabric_services.demo import command

        return getattr(command, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

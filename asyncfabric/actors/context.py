"""Context: what the running task belongs to. Inherited by the tasks that it starts, as context variables are.

Pure; no I/O. The trace context of requests is in `trace`, since users set it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncfabric.actors.life import Life
    from asyncfabric.actors.node import Node

current_node: ContextVar[Node | None] = ContextVar("asyncfabric_node", default=None)
"""The node of the running task; references that came in a message go through it."""

inside: ContextVar[Life | None] = ContextVar("asyncfabric_inside", default=None)
"""The life that the running task is part of; None outside of actors."""

handling: ContextVar[Life | None] = ContextVar("asyncfabric_handling", default=None)
"""The life that waits for the running task to handle a message; None outside of handlers."""

"""Looking at a running fabric: who waits for what (`why`). Reads only; nothing here changes a fabric."""

from asyncfabric.observe.why import format_waiting

__all__ = ["format_waiting"]

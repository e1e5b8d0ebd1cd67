"""The two faces of one interface, as the modules that callers import: the real NIXL, which is the oracle, and ours."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from differences import DIFFERENCES

REAL, OURS = "real", "ours"
FACES = (REAL, OURS)


@dataclass(frozen=True)
class Face:
    """One implementation: `api` is its module of agents, `bindings` that of lists and error classes."""

    name: str
    api: Any
    bindings: Any

    @property
    def ours(self) -> bool:
        """Return whether this is the face of asyncfabric."""
        return self.name == OURS

    @property
    def over_tcp(self) -> dict[str, str]:
        """Return the environment in which agents move bytes over TCP alone."""
        return {"ASYNCFABRIC_NIXL_RAILS": "tcp"} if self.ours else {"UCX_TLS": "tcp"}

    def differs(self, name: str) -> bool:
        """Return whether this face is ours, for a difference that is listed."""
        assert name in DIFFERENCES, name
        return self.ours

    def agent(self, name: str, **config: Any) -> Any:
        """Return a new agent."""
        return self.api.nixl_agent(name, self.api.nixl_agent_config(**config))

    def error(self, name: str) -> type[Exception]:
        """Return an error class by the part of its name between `nixl` and `Error`."""
        found: type[Exception] = getattr(self.bindings, f"nixl{name}Error")
        return found


def open_face(name: str) -> Face:
    """Return a face by name; the real one is the wheel's own module, which ours never replaces."""
    package = "nixl_cu13"
    if name == OURS:
        importlib.import_module("asyncfabric.integrations.nixl").install()
        package = "nixl"
    return Face(name, importlib.import_module(f"{package}._api"), importlib.import_module(f"{package}._bindings"))

"""The only importer of the compiled engine. Imported lazily, so that fakes work where nothing was built.

Runs on the event loop's thread, once per fabric. No policy: which rails "auto" means is decided in choice.py.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncfabric._bridge.buffers import ResolvedBuffer, resolve_buffer
from asyncfabric._bridge.choice import choose_rails
from asyncfabric._bridge.engine import Engine
from asyncfabric._bridge.gpu_in_use import gpu_in_use
from asyncfabric._bridge.machine import NativeTopology
from asyncfabric.config import FabricConfig
from asyncfabric.errors import DeviceError


def open_native_engine(config: FabricConfig, root: str = "/") -> Engine:
    """Open the compiled engine, with the rails that are chosen for the machine at `root` where `config` asks for that.

    Raises DeviceError when it was not built.
    """
    try:
        from asyncfabric import _native
    except ImportError as error:
        raise DeviceError(f"the compiled engine cannot be loaded: {error}", remedy=_REMEDY) from error
    if not config.automatic:
        return _native.Engine(config)
    named = config.rail_specs()
    providers = {spec.provider.rpartition("+")[2] for spec in named}
    # Reading a machine costs milliseconds, and only NICs have to be chosen by where they sit.
    topology = _native.read_topology(root) if _has_rdma_devices(root) else None
    choice = choose_rails(topology, gpu_in_use(), _native.build_info()["providers"], providers, config.require)
    rails = [(rail.spec, rail.reason, True) for rail in choice.rails] + [(spec, "named", False) for spec in named]
    if not rails:
        why = "; ".join(f"{rail.rail}: {rail.reason}" for rail in choice.left_out)
        raise DeviceError(f"no rail could be chosen: {why}", remedy="name the rails: FabricConfig(rails=(...))")
    return _native.Engine(config, rails, [asdict(rail) for rail in choice.left_out])


def _has_rdma_devices(root: str) -> bool:
    try:
        return bool(os.listdir(os.path.join(root, "sys/class/infiniband")))
    except OSError:
        return False


def read_native_topology(root: str) -> NativeTopology:
    """Read a machine's topology; see `asyncfabric.observe.topology`. Raises DeviceError when nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError as error:
        raise DeviceError(f"the compiled engine cannot be loaded: {error}", remedy=_REMEDY) from error
    return _native.read_topology(root)


def read_native_build() -> dict[str, Any]:
    """Return the attributes of `asyncfabric.observe.Build`. Raises DeviceError when nothing was compiled."""
    try:
        from asyncfabric import _native
    except ImportError as error:
        raise DeviceError(f"the compiled engine cannot be loaded: {error}", remedy=_REMEDY) from error
    commit = Path(_native.__file__).with_name("commit.txt")  # setup.py leaves it beside the engine of a wheel
    return {**_native.build_info(), "commit": commit.read_text().strip() if commit.is_file() else ""}


def resolve_native_buffer(buffer: object) -> ResolvedBuffer:
    """Resolve a buffer as the compiled border does; see `asyncfabric._bridge.buffers`."""
    from asyncfabric import _native

    return resolve_buffer(buffer, _native.resolve_buffer)


_REMEDY = "run `make build`, or `pip install asyncfabric` on a machine with a C++20 compiler; `make test` needs it too"

"""The one fabric of a process whose framework has no place for it: opened by the first call that needs it.

Any thread. Closed when the interpreter exits, after what was submitted has drained; a fork's child opens its own. Rails
come from `configure()`, or from ASYNCFABRIC_RAILS (`rails_variable`); without either they are those of FabricConfig.
"""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from threading import Lock

from asyncfabric import blocking
from asyncfabric.config import FabricConfig
from asyncfabric.errors import DeviceError
from asyncfabric.integrations.rails_variable import RAILS_VARIABLE, config_from


class _Process:
    """The fabric of this process, and what it is opened with."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.stack = ExitStack()
        self.fabric: blocking.Fabric | None = None
        self.config: FabricConfig | None = None


_process = _Process()


def configure(config: FabricConfig | None) -> None:
    """Choose how the fabric of this process is opened; None leaves it to the environment.

    Raises:
        TypeError: not a FabricConfig.
        RuntimeError: the fabric is open already.
    """
    if config is not None and not isinstance(config, FabricConfig):
        raise TypeError(f"configure() takes a FabricConfig or None, got {type(config).__name__}")
    with _process.lock:
        if _process.fabric is not None and not _process.fabric.closed:
            raise RuntimeError("the fabric of this process is open; call configure() before the first transfer")
        _process.config = config


def config_in_force() -> FabricConfig:
    """Return what the fabric is opened with: that of `configure()`, or the rails of the environment.

    Raises:
        ValueError: ASYNCFABRIC_RAILS names a malformed rail.
    """
    if _process.config is not None:
        return _process.config
    return config_from(os.environ)


def process_fabric() -> blocking.Fabric:
    """Return the open fabric of this process; the first call opens it.

    Raises:
        ValueError: ASYNCFABRIC_RAILS names a malformed rail.
        DeviceError: a rail cannot be opened.
    """
    with _process.lock:
        fabric = _process.fabric
        if fabric is None or fabric.closed:
            config = config_in_force()
            try:
                fabric = _process.stack.enter_context(blocking.open_fabric(config))
            except DeviceError as error:
                error.add_note(f"the fabric of process {os.getpid()} has rails={config.rails!r}; set {RAILS_VARIABLE}")
                raise
            _process.fabric = fabric
        return fabric


def close_process_fabric() -> None:
    """Drain and close the fabric of this process, if it is open; the next `process_fabric()` opens a new one.

    Raises:
        TransferError: a device may still touch memory that was registered.
    """
    with _process.lock:
        stack, _process.stack, _process.fabric = _process.stack, ExitStack(), None
    stack.close()


def _begin_anew() -> None:
    """Forget the parent's fabric in a fork's child, where it is closed; its lock may be held by a lost thread."""
    _process.lock = Lock()
    _process.fabric = None
    _process.stack.pop_all()
    _process.stack = ExitStack()


atexit.register(close_process_fabric)
os.register_at_fork(after_in_child=_begin_anew)

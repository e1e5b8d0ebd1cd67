"""How an agent is made: NIXL's configuration, by its names, and what the face adds to it.

Values, any thread.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from asyncfabric import FabricConfig

if TYPE_CHECKING:
    from asyncfabric._api.opening import EngineFactory

DEFAULT_COMM_PORT = 8888


class nixl_thread_sync_t(Enum):
    """NIXL's modes of synchronization; agents of the face take calls from all threads in each of them."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0  # noqa: PIE796  # an alias, as in NIXL


class nixl_agent_config:
    """How an agent is made.

    Args:
        enable_prog_thread: have a thread of the agent send notes and take notes in that its callers leave.
        enable_listen_thread, listen_port: not offered; metadata travels by the caller's own means.
        capture_telemetry: keep what get_xfer_telemetry() returns.
        num_threads: without effect: each fabric has one worker.
        backends: names of network backends of NIXL; all stand for the fabric.
        sync_mode: without effect.
        fabric: how the agent's fabric is opened; None takes the environment (`asyncfabric.integrations.nixl.settings`).
        engine_factory: makes its engine, for tests: `asyncfabric.testing.FakeEngine`. None takes the compiled engine.
    """

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: list[str] | None = None,
        sync_mode: nixl_thread_sync_t | None = None,
        *,
        fabric: FabricConfig | None = None,
        engine_factory: EngineFactory | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, got {type(sync_mode).__name__!r}")
        self.backends: list[str] = ["UCX"] if backends is None else backends
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode
        self.fabric = fabric
        self.engine_factory = engine_factory

"""An engine driven by hand: no Fabric, no event loop.

For the native loops, which must be the only consumer of its completions. Blocks the calling thread; one control call
at a time.
"""

from __future__ import annotations

import time
from typing import Any

from asyncfabric._bridge.engine import Completion, CompletionKind, EngineStatusError
from asyncfabric.bench.pattern import Bytes
from asyncfabric.config import FabricConfig

CONTROL_DEADLINE_S = 30.0


class BareEngine:
    """One compiled engine with blocking control calls.

    Attributes:
        native: the engine itself, for the loops of `native_loops`.
        manual: the engine has no worker; whoever waits for it calls step().
    """

    def __init__(self, config: FabricConfig) -> None:
        """Open the engine; raises DeviceError when a rail cannot be opened or nothing was built."""
        from asyncfabric._bridge.native import open_native_engine

        # The protocol names what fabrics need; the loops need the compiled class itself.
        self.native: Any = open_native_engine(config)
        self.manual: bool = config.polling == "manual"
        self._cookie = 0
        self._closed = False

    def allocate(self, length_bytes: int) -> int:
        """Allocate an engine-owned region that peers may write; return its id."""
        return self._control("submit_allocate", length_bytes, -1, 1).value

    def register(self, memory: Bytes) -> int:
        """Register foreign memory that peers may write; return the region's id. The caller keeps `memory` alive."""
        return self._control("submit_register", memory.ctypes.data, memory.nbytes, -1, 1).value

    def connect(self, address: bytes) -> int:
        """Connect to another engine; return the peer's id."""
        return self._control("submit_connect", address).value

    def close(self) -> None:
        """Drain, close and join; idempotent."""
        if not self._closed:
            self._closed = True
            self._control("submit_close", False)
            self.native.close()

    def _control(self, call: str, *arguments: Any) -> Completion:
        self._cookie += 1
        getattr(self.native, call)(self._cookie, *arguments)
        deadline = time.monotonic() + CONTROL_DEADLINE_S
        while time.monotonic() < deadline:
            if self.manual:
                self.native.step()
            batch: list[Completion] = self.native.poll(64)
            for completion in batch:
                if completion.cookie != self._cookie or completion.kind == CompletionKind.OP:
                    continue
                if completion.code:
                    text = f"{call}: {self.native.last_error()}"
                    raise EngineStatusError(completion.code, completion.status_kind, completion.raw, text)
                return completion
            time.sleep(0.0002)
        raise TimeoutError(f"{call} did not end within {CONTROL_DEADLINE_S} s")

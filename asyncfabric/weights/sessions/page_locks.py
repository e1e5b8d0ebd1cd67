"""Page locks on the shadows in host memory that a GPU's tensors are copied from: six times the rate on an H100.

The rail of a GPU locks its own mapping of a region, and the tensors over a shadow are another one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

import anyio
import numpy as np

from asyncfabric._gpu import Driver, memory, open_driver
from asyncfabric.errors import DeviceError
from asyncfabric.weights.memory.device import Memory
from asyncfabric.weights.threads import in_thread

logger: logging.Logger = logging.getLogger(__name__)


def locked_for(gpu: int | None, shadows: Sequence[Memory]) -> AbstractAsyncContextManager[None]:
    """Return what keeps shadows locked, of those that are in host memory; nothing where no GPU copies from them."""
    on_host = [shadow for shadow in shadows if isinstance(shadow, np.ndarray)]
    return page_locked(on_host, gpu) if on_host and gpu is not None else nullcontext()


@asynccontextmanager
async def page_locked(shadows: Sequence[np.ndarray], gpu: int, driver: Driver | None = None) -> AsyncIterator[None]:
    """Lock host memory while the block runs, before whose end no copy from it is under way.

    What the driver refuses stays as it is, is copied from slowly, and the log names the reason.

    Args:
        shadows: bytes in host memory.
        gpu: number of the GPU that copies from them.
        driver: of NVIDIA; None opens it.

    Cancellation: shielded while locks are taken off; then it goes on.
    """
    locked: list[int] = []

    def lock() -> None:
        known = driver or open_driver()
        known.enter(gpu)
        for shadow in shadows:
            base = shadow.ctypes.data
            if memory.pin(known, base, shadow.nbytes):
                locked.append(base)

    def unlock() -> None:
        known = driver or open_driver()
        known.enter(gpu)
        for base in locked:
            memory.unpin(known, base)

    try:
        try:
            await in_thread(lock)
        except DeviceError as error:
            logger.warning("versions come into the tensors of GPU %d slowly, without page locks: %s", gpu, error)
        yield
    finally:
        if locked:
            with anyio.CancelScope(shield=True):
                await in_thread(unlock)

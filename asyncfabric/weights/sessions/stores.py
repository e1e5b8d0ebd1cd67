"""Where a training and its engines meet: a TCPStore of torch, which rank 0 of the training serves. Any thread."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def serve_store(host: str, port: int, deadline_s: float) -> tuple[Any, int]:
    """Return a store that this process serves, and its port.

    Args:
        host: as others reach this process.
        port: 0 takes a free one.
        deadline_s: of a call.

    Raises:
        RuntimeError: the port is taken.
    """
    deadline = timedelta(seconds=deadline_s)
    store: Any = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=deadline)  # type: ignore[attr-defined]
    return store, int(store.port)


def connect_store(host: str, port: int, deadline_s: float) -> Any:
    """Return a store that another process serves.

    Raises:
        RuntimeError: nobody serves it by the deadline.
    """
    deadline = timedelta(seconds=deadline_s)
    return dist.TCPStore(host, port, is_master=False, timeout=deadline)  # type: ignore[attr-defined]

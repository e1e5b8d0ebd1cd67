"""Processes that begin with torch loaded: a server of this process loads it once, and forks them."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOADED: ForkServerContext = multiprocessing.get_context("forkserver")
"""In place of `spawn`, with which each process loads torch for five seconds. The server itself uses no GPU."""


def start_server() -> None:
    """Start the server, which loads in the background."""
    PRELOADED.set_forkserver_preload(["torch", "torch.distributed", "trio", "asyncfabric.moe.gpu"])
    forkserver.ensure_running()

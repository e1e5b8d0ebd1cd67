"""The compiled engine. Only `_bridge.native` and `_kernels.native` import this room; no policy and no await lives here.

`_engine` is built from cython_ext/ and native/. What it exports is described in `_engine.pyi`.
"""

from __future__ import annotations

try:
    from asyncfabric._native._engine import (
        BoxSums,
        Buffer,
        Engine,
        build_info,
        converting,
        ordering,
        picking,
        read_topology,
        record_loops,
        resolve_buffer,
        row_loops,
        sum_words,
    )
except ModuleNotFoundError as missing:
    if missing.name != "asyncfabric._native._engine":
        raise
    raise ImportError(
        "the compiled engine of asyncfabric is not built for this Python: run `make build` in a checkout "
        "(or `pip install -e .`), or install a wheel; `asyncfabric.testing` works without it"
    ) from missing

__all__ = [
    "BoxSums",
    "Buffer",
    "Engine",
    "build_info",
    "converting",
    "ordering",
    "picking",
    "read_topology",
    "record_loops",
    "resolve_buffer",
    "row_loops",
    "sum_words",
]

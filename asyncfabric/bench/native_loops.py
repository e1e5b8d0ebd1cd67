"""The bare native loops: the ceilings of this machine, and an engine driven without Python.

The second door to the compiled border beside `_bridge.native`, for measurements only. Blocking, with the GIL released.
Each returns seconds, or (started_ns, finished_ns, operations) for loops over an engine of `engine_level.BareEngine`.
Import it where you measure: programs that measure nothing never need it.
"""

from __future__ import annotations

from asyncfabric._native._engine import (
    bench_allow_cma as allow_cma,
)
from asyncfabric._native._engine import (
    bench_cma as cma,
)
from asyncfabric._native._engine import (
    bench_cma_pages as cma_pages,
)
from asyncfabric._native._engine import (
    bench_copy as copy,
)
from asyncfabric._native._engine import (
    bench_copy_pages as copy_pages,
)
from asyncfabric._native._engine import (
    bench_engine_pages as engine_pages,
)
from asyncfabric._native._engine import (
    bench_engine_ping as engine_ping,
)
from asyncfabric._native._engine import (
    bench_engine_spin as engine_spin,
)
from asyncfabric._native._engine import (
    bench_engine_writes as engine_writes,
)
from asyncfabric._native._engine import (
    bench_eventfd_ping as eventfd_ping,
)
from asyncfabric._native._engine import (
    bench_eventfd_pong as eventfd_pong,
)
from asyncfabric._native._engine import (
    bench_libfabric as libfabric,
)
from asyncfabric._native._engine import (
    bench_non_temporal_kind as non_temporal_kind,
)
from asyncfabric._native._engine import (
    bench_spin_round_trips as spin_round_trips,
)
from asyncfabric._native._engine import (
    bench_stream_receive as stream_receive,
)
from asyncfabric._native._engine import (
    bench_stream_send as stream_send,
)

__all__ = [
    "allow_cma",
    "cma",
    "cma_pages",
    "copy",
    "copy_pages",
    "engine_pages",
    "engine_ping",
    "engine_spin",
    "engine_writes",
    "eventfd_ping",
    "eventfd_pong",
    "libfabric",
    "non_temporal_kind",
    "spin_round_trips",
    "stream_receive",
    "stream_send",
]

"""The door to the bare native loops: the ceilings of this machine, and an engine driven without Python.

Blocking, with the GIL released. Each returns seconds, or (started_ns, finished_ns, operations) for loops over an engine
of `engine_level.BareEngine`. Import it where you measure: programs that measure nothing never need it.
"""

from asyncfabric._bridge.loops import (
    allow_cma,
    cma,
    cma_pages,
    copy,
    copy_pages,
    engine_pages,
    engine_ping,
    engine_spin,
    engine_writes,
    eventfd_ping,
    eventfd_pong,
    libfabric,
    non_temporal_kind,
    spin_round_trips,
    stream_receive,
    stream_send,
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

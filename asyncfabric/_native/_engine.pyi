# _engine.pyi: types of the compiled border, the twin of cython_ext/*.pxi. What Engine has is written once, in the
# protocol of asyncfabric._bridge.engine; a test compares the compiled class with it.
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypedDict

from asyncfabric._bridge.engine import Engine as EngineProtocol
from asyncfabric._bridge.machine import NativeTopology
from asyncfabric._kernels.converting import Converting
from asyncfabric._kernels.ordering import Ordering
from asyncfabric._kernels.picking import Picking
from asyncfabric._kernels.records import RecordLoops
from asyncfabric._kernels.rows import RowLoops
from asyncfabric._kernels.summing import MakeBoxSums, SumWords
from asyncfabric.config import FabricConfig, RailSpec

class BuildInfo(TypedDict):
    version: str
    providers: tuple[str, ...]
    compiler: str
    glibc: str
    sanitize: str
    debug: bool

class Buffer(NamedTuple):
    address: int
    length_bytes: int
    device: int
    readonly: bool
    keepalive: object

class MakeEngine(Protocol):
    def __call__(
        self,
        config: FabricConfig,
        chosen: Sequence[tuple[RailSpec, str, bool]] | None = None,
        left_out: Sequence[dict[str, str]] = (),
    ) -> EngineProtocol: ...

def build_info() -> BuildInfo: ...
def resolve_buffer(obj: object) -> Buffer: ...

# The bare loops of `asyncfabric bench` (bench.pxi); seconds are returned. Buffers are contiguous bytes.
def bench_non_temporal_kind() -> str: ...
def bench_allow_cma() -> None: ...
def bench_copy(target: Any, source: Any, op_bytes: int, count: int, non_temporal: bool) -> float: ...
def bench_copy_pages(
    target: Any, source: Any, target_pages: Any, source_pages: Any, page_bytes: int, rounds: int, non_temporal: bool
) -> float: ...
def bench_cma(pid: int, target_address: int, source: Any, op_bytes: int, count: int) -> float: ...
def bench_cma_pages(
    pid: int, target_address: int, source: Any, target_pages: Any, source_pages: Any, page_bytes: int, rounds: int
) -> float: ...
def bench_stream_send(socket: int, source: Any, op_bytes: int, count: int) -> float: ...
def bench_stream_receive(socket: int, target: Any, total_bytes: int) -> float: ...
def bench_eventfd_ping(out: int, into: int, samples_ns: Any) -> float: ...
def bench_eventfd_pong(out: int, into: int, count: int) -> float: ...
def bench_spin_round_trips(samples_ns: Any) -> float: ...
def bench_libfabric(
    profile: str,
    workload: str,
    op_bytes: int,
    operations: int,
    warmup: int,
    window: int,
    pages: int,
    region_bytes: int,
    control_fd: int,
    initiator: bool,
) -> dict[str, Any]: ...

# The native loops over an Engine (bench_engine.pxi): (started_ns, finished_ns, operations).
def bench_engine_writes(
    engine: EngineProtocol,
    region: int,
    key: int,
    region_bytes: int,
    op_bytes: int,
    window: int,
    count: int,
    imm: int,
    samples_ns: Any,
    drive: bool,
) -> tuple[int, int, int]: ...
def bench_engine_pages(
    engine: EngineProtocol,
    region: int,
    key: int,
    source_pages: Any,
    target_pages: Any,
    page_bytes: int,
    imm: int,
    samples_ns: Any,
    drive: bool,
) -> tuple[int, int, int]: ...
def bench_engine_spin(engine: EngineProtocol, counter: int, target: int, deadline_ns: int) -> tuple[int, int, int]: ...
def bench_engine_ping(
    engine: EngineProtocol,
    peer: int,
    region: int,
    key: int,
    op_bytes: int,
    counter: int,
    base: int,
    imm: int,
    deadline_ns: int,
    samples_ns: Any,
    count: int,
    first: bool,
    drive: bool,
) -> tuple[int, int, int]: ...
def read_topology(root: str) -> NativeTopology: ...  # topology.pxi

Engine: MakeEngine  # engine.pxi and the rooms that it joins
row_loops: RowLoops  # rows/rows.pxi
record_loops: RecordLoops  # rows/records.pxi
ordering: Ordering  # summing.pxi
picking: Picking  # picking.pxi
BoxSums: MakeBoxSums  # summing.pxi
sum_words: SumWords  # summing.pxi
converting: Converting  # converting.pxi

# bench_engine.pxi: the native loops over an Engine for `asyncfabric bench --engine-level`, without the GIL throughout.
# The caller is the engine's one consumer of completions meanwhile: no Fabric may sit on the same engine.


cdef tuple engine_loop_result(EngineLoopResult result, str what):
    """Return (started_ns, finished_ns, operations), or raise EngineStatusError for the first failure."""
    check(result.status, what)
    return result.started_ns, result.finished_ns, result.operations


def bench_engine_writes(Engine engine, uint64_t region, uint64_t key, uint64_t region_bytes, uint64_t op_bytes,
                        uint64_t window, uint64_t count, int64_t imm, uint64_t[::1] samples_ns, bint drive) -> tuple:
    """Write `count` times with `window` in flight; `samples_ns` is empty or gets a duration for each write."""
    cdef WriteLoop loop
    cdef EngineLoopResult result
    check_walk(region_bytes, op_bytes, "engine_writes")
    if window == 0:
        raise ValueError("engine_writes: window must be at least 1, got 0")
    if samples_ns.shape[0] not in (0, count):
        raise ValueError(f"engine_writes: samples_ns must have 0 or {count} places, got {samples_ns.shape[0]}")
    loop.region = region
    loop.key = key
    loop.region_bytes = region_bytes
    loop.op_bytes = op_bytes
    loop.window = window
    loop.count = count
    loop.imm = imm
    loop.drive = drive
    loop.samples_ns = &samples_ns[0] if samples_ns.shape[0] else NULL
    cdef NativeEngine* native = engine.enter()
    try:
        with nogil:
            result = write_loop(native[0], loop)
    finally:
        engine.leave()
    return engine_loop_result(result, "engine_writes")


def bench_engine_pages(Engine engine, uint64_t region, uint64_t key, const int64_t[::1] source_pages,
                       const int64_t[::1] target_pages, uint64_t page_bytes, int64_t imm,
                       uint64_t[::1] samples_ns, bint drive) -> tuple:
    """Write the page list once for each place of `samples_ns`, one call after the other."""
    cdef PageBatch pages
    cdef EngineLoopResult result
    if source_pages.shape[0] != target_pages.shape[0] or source_pages.shape[0] == 0 or samples_ns.shape[0] == 0:
        raise ValueError("engine_pages: two page lists of one length and at least one round are needed")
    pages.source_pages = &source_pages[0]
    pages.target_pages = &target_pages[0]
    pages.count = source_pages.shape[0]
    pages.page_bytes = page_bytes
    pages.source_stride = page_bytes
    pages.target_stride = page_bytes
    pages.source_offset = 0
    pages.target_offset = 0
    cdef NativeEngine* native = engine.enter()
    try:
        with nogil:
            result = pages_loop(native[0], region, key, pages, samples_ns.shape[0], imm, drive, &samples_ns[0])
    finally:
        engine.leave()
    return engine_loop_result(result, "engine_pages")


def bench_engine_spin(Engine engine, uint64_t counter, uint64_t target, uint64_t deadline_ns) -> tuple:
    """Spin until the counter reached `target`; finished_ns is when it had."""
    cdef EngineLoopResult result
    cdef NativeEngine* native = engine.enter()
    try:
        with nogil:
            result = spin_loop(native[0], counter, target, deadline_ns)
    finally:
        engine.leave()
    return engine_loop_result(result, "engine_spin")


def bench_engine_ping(Engine engine, uint64_t peer, uint64_t region, uint64_t key, uint64_t op_bytes, uint64_t counter,
                      uint64_t base, int64_t imm, uint64_t deadline_ns, uint64_t[::1] samples_ns, uint64_t count,
                      bint first, bint drive) -> tuple:
    """Play `count` rounds of signal (op_bytes 0) or write with imm and spin; `first` serves, fills `samples_ns`."""
    cdef PingLoop loop
    cdef EngineLoopResult result
    if first and <uint64_t> samples_ns.shape[0] < max(count, 1):
        raise ValueError(f"engine_ping: samples_ns must have {max(count, 1)} places, got {samples_ns.shape[0]}")
    loop.peer = peer
    loop.region = region
    loop.key = key
    loop.op_bytes = op_bytes
    loop.counter = counter
    loop.base = base
    loop.imm = imm
    loop.count = count
    loop.deadline_ns = deadline_ns
    loop.drive = drive
    cdef NativeEngine* native = engine.enter()
    try:
        with nogil:
            if first:
                result = ping_loop(native[0], loop, &samples_ns[0])
            else:
                result = pong_loop(native[0], loop)
    finally:
        engine.leave()
    return engine_loop_result(result, "engine_ping")

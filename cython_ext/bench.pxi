# bench.pxi: the bare loops of `asyncfabric bench`, with the GIL released for their whole length. For asyncfabric.bench.
# Sizes are checked here, since the loops themselves check nothing; which loop is compared with what is decided above.


cdef object loop_seconds(LimitResult result, str what):
    """Return the seconds a loop took, or raise OSError."""
    if result.error:
        raise OSError(result.error, f"{what}: {(<bytes> strerror(result.error)).decode()}")
    return result.elapsed_ns * 1e-9


cdef int check_walk(size_t room, uint64_t op_bytes, str what) except -1:
    if op_bytes == 0 or op_bytes > room:
        raise ValueError(f"{what}: op_bytes must be in 1..{room} (the region), got {op_bytes}")
    return 0


cdef int check_page_list(const int64_t[::1] pages, size_t room, uint64_t page_bytes, str what) except -1:
    cdef Py_ssize_t i
    if page_bytes == 0 or page_bytes > room:
        raise ValueError(f"{what}: page_bytes must be in 1..{room} (the region), got {page_bytes}")
    cdef int64_t last = <int64_t> (room // page_bytes) - 1
    for i in range(pages.shape[0]):
        if pages[i] < 0 or pages[i] > last:
            raise ValueError(f"{what}: page {pages[i]} at index {i} is not in 0..{last}")
    return 0


def bench_non_temporal_kind() -> str:
    """Return which streaming stores the non-temporal loops use: avx512, avx2, sse2 or none."""
    return (<bytes> non_temporal_kind()).decode("ascii")


def bench_allow_cma() -> None:
    """Let other processes of this user write here with process_vm_writev, where the kernel restricts it."""
    allow_cma()


def bench_copy(unsigned char[::1] target, const unsigned char[::1] source, uint64_t op_bytes, uint64_t count,
               bint non_temporal) -> float:
    """Copy `count` times `op_bytes`, walking round both regions; return seconds."""
    cdef size_t room = min(target.shape[0], source.shape[0])
    cdef CopyKind kind = CopyKind.kNonTemporal if non_temporal else CopyKind.kPlain
    cdef LimitResult result
    check_walk(room, op_bytes, "copy")
    with nogil:
        result = copy_loop(kind, &target[0], &source[0], room, op_bytes, count)
    return loop_seconds(result, "copy")


def bench_copy_pages(unsigned char[::1] target, const unsigned char[::1] source, const int64_t[::1] target_pages,
                     const int64_t[::1] source_pages, uint64_t page_bytes, uint64_t rounds, bint non_temporal) -> float:
    """Copy page by page, the whole list `rounds` times; return seconds."""
    cdef CopyKind kind = CopyKind.kNonTemporal if non_temporal else CopyKind.kPlain
    cdef uint64_t pages = min(target_pages.shape[0], source_pages.shape[0])
    cdef LimitResult result
    check_page_list(target_pages, target.shape[0], page_bytes, "copy_pages target")
    check_page_list(source_pages, source.shape[0], page_bytes, "copy_pages source")
    if pages == 0:
        return 0.0
    with nogil:
        result = copy_pages(kind, &target[0], &source[0], &target_pages[0], &source_pages[0], pages, page_bytes, rounds)
    return loop_seconds(result, "copy_pages")


def bench_cma(int32_t pid, uint64_t target_address, const unsigned char[::1] source, uint64_t op_bytes,
              uint64_t count) -> float:
    """As bench_copy, with process_vm_writev into a region of the same length in process `pid`; return seconds."""
    cdef LimitResult result
    check_walk(source.shape[0], op_bytes, "cma")
    with nogil:
        result = cma_loop(pid, target_address, &source[0], source.shape[0], op_bytes, count)
    return loop_seconds(result, "process_vm_writev")


def bench_cma_pages(int32_t pid, uint64_t target_address, const unsigned char[::1] source,
                    const int64_t[::1] target_pages, const int64_t[::1] source_pages, uint64_t page_bytes,
                    uint64_t rounds) -> float:
    """As bench_copy_pages, with process_vm_writev over the list into a region of the same length; return seconds."""
    cdef uint64_t pages = min(target_pages.shape[0], source_pages.shape[0])
    cdef LimitResult result
    check_page_list(target_pages, source.shape[0], page_bytes, "cma_pages target")
    check_page_list(source_pages, source.shape[0], page_bytes, "cma_pages source")
    if pages == 0:
        return 0.0
    with nogil:
        result = cma_pages(pid, target_address, &source[0], &target_pages[0], &source_pages[0], pages, page_bytes,
                           rounds)
    return loop_seconds(result, "process_vm_writev")


def bench_stream_send(int32_t socket, const unsigned char[::1] source, uint64_t op_bytes, uint64_t count) -> float:
    """Send `count` times `op_bytes` on a blocking stream socket; return seconds until the last was acknowledged."""
    cdef LimitResult result
    check_walk(source.shape[0], op_bytes, "stream")
    with nogil:
        result = stream_send(socket, &source[0], source.shape[0], op_bytes, count)
    return loop_seconds(result, "stream_send")


def bench_stream_receive(int32_t socket, unsigned char[::1] target, uint64_t total_bytes) -> float:
    """Receive `total_bytes` from bench_stream_send, walking round the region; return seconds."""
    cdef LimitResult result
    check_walk(target.shape[0], 1, "stream")
    with nogil:
        result = stream_receive(socket, &target[0], target.shape[0], total_bytes)
    return loop_seconds(result, "stream_receive")


def bench_eventfd_ping(int32_t out, int32_t into, uint64_t[::1] samples_ns) -> float:
    """Play one ping per sample over two blocking eventfds; return seconds."""
    cdef LimitResult result
    if samples_ns.shape[0] == 0:
        return 0.0
    with nogil:
        result = eventfd_ping(out, into, samples_ns.shape[0], &samples_ns[0])
    return loop_seconds(result, "eventfd_ping")


def bench_eventfd_pong(int32_t out, int32_t into, uint64_t count) -> float:
    """Answer `count` pings; return seconds."""
    cdef LimitResult result
    with nogil:
        result = eventfd_pong(out, into, count)
    return loop_seconds(result, "eventfd_pong")


def bench_spin_round_trips(uint64_t[::1] samples_ns) -> float:
    """Play ping-pong between two spinning threads of this process, one round per sample; return seconds."""
    cdef LimitResult result
    if samples_ns.shape[0] == 0:
        return 0.0
    with nogil:
        result = spin_round_trips(samples_ns.shape[0], &samples_ns[0])
    return loop_seconds(result, "spin_round_trips")


LIBFABRIC_WORKLOADS = {"writes": 0, "pages": 1, "ping-pong": 2}


def bench_libfabric(str profile, str workload, uint64_t op_bytes, uint64_t operations, uint64_t warmup, uint32_t window,
                    uint32_t pages, uint64_t region_bytes, int control_fd, bint initiator) -> dict:
    """Run one end of the bare loop; both ends meet over `control_fd` with the same arguments.

    The profile "verbs" is the loop straight on libibverbs, every other one that on libfabric. For "pages", `operations`
    is the number of batches. Raises OSError with the loop's own sentence.
    """
    cdef LoopConfig config
    cdef LoopResult result
    cdef int error
    config.profile = profile.encode()
    config.workload = <LoopWorkload> <uint32_t> LIBFABRIC_WORKLOADS[workload]
    config.bytes = op_bytes
    config.operations = operations
    config.warmup = warmup
    config.window = window
    config.pages = pages
    config.rounds = <uint32_t> operations
    config.region_bytes = region_bytes
    cdef bint verbs = profile == "verbs"
    with nogil:
        if verbs and initiator:
            error = verbs_initiator(config, control_fd, &result)
        elif verbs:
            error = verbs_target(config, control_fd, &result)
        elif initiator:
            error = libfabric_initiator(config, control_fd, &result)
        else:
            error = libfabric_target(config, control_fd, &result)
    if error:
        raise OSError(error, f"bare {'libibverbs' if verbs else 'libfabric'} loop: {text_of(result.error)}")
    return {
        "verified": bool(result.verified),
        "seconds": result.seconds,
        "bytes": result.bytes,
        "operations": result.operations,
        "p50_us": result.p50_us,
        "p99_us": result.p99_us,
        "provider": text_of(result.provider),
        "library": text_of(result.library),
    }

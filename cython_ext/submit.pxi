# submit.pxi: data ops. Each call returns the op id at once and ends as an OP completion. The GIL is given up, since
# small ops may be posted by the calling thread and page lists are copied. No Python object is made per page.


cdef PageBatch page_batch(const int64_t[::1] source_pages, const int64_t[::1] target_pages, uint64_t page_bytes,
                          uint64_t source_stride, uint64_t target_stride, uint64_t source_offset,
                          uint64_t target_offset) except *:
    """Describe pages by two index buffers, which the caller keeps until the engine has copied them."""
    cdef PageBatch pages
    if source_pages.shape[0] != target_pages.shape[0]:
        raise ValueError(f"{source_pages.shape[0]} source pages but {target_pages.shape[0]} target pages")
    pages.count = <uint64_t> source_pages.shape[0]
    pages.source_pages = &source_pages[0] if pages.count else NULL
    pages.target_pages = &target_pages[0] if pages.count else NULL
    pages.page_bytes = page_bytes
    pages.source_stride = source_stride
    pages.target_stride = target_stride
    pages.source_offset = source_offset
    pages.target_offset = target_offset
    return pages


cdef str pages_text(const PageBatch& pages):
    """Return the shape of page lists, for errors."""
    return (f"{pages.count} pages of {pages.page_bytes} bytes, strides {pages.source_stride} and "
            f"{pages.target_stride}, offsets {pages.source_offset} and {pages.target_offset}")


cdef class _DataRoom(_ControlRoom):
    """Writes, reads, signals, sends. Not public: a layer of `Engine`."""

    def submit_write(self, uint64_t cookie, uint64_t region, uint64_t offset, uint64_t length, uint64_t key,
                     uint64_t target_offset, int64_t imm, uint64_t after=0):
        """Write a range of a region to a range of a key; `imm` -1 counts nothing, `after` is a mark of a stream."""
        cdef Status status
        cdef uint64_t op = 0
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_write(cookie, region, offset, length, key, target_offset, imm, &op, after)
        finally:
            self.leave()
        if not status.ok():
            check(status, f"write of [{offset}, {offset + length}) to offset {target_offset}, imm {imm}")
        return op

    def submit_read(self, uint64_t cookie, uint64_t region, uint64_t offset, uint64_t length, uint64_t key,
                    uint64_t target_offset):
        """Read a range of a key into a range of a region."""
        cdef Status status
        cdef uint64_t op = 0
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_read(cookie, region, offset, length, key, target_offset, &op)
        finally:
            self.leave()
        if not status.ok():
            check(status, f"read of offset {target_offset} into [{offset}, {offset + length})")
        return op

    def submit_write_pages(self, uint64_t cookie, uint64_t region, const int64_t[::1] source_pages not None,
                           uint64_t key, const int64_t[::1] target_pages not None, uint64_t page_bytes,
                           uint64_t source_stride, uint64_t target_stride, uint64_t source_offset,
                           uint64_t target_offset, int64_t imm, uint64_t after=0):
        """Write pages by two C-contiguous int64 index buffers, which the engine copies before this returns."""
        cdef Status status
        cdef uint64_t op = 0
        cdef PageBatch pages = page_batch(source_pages, target_pages, page_bytes, source_stride, target_stride,
                                          source_offset, target_offset)
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_write_pages(cookie, region, key, pages, imm, &op, after)
        finally:
            self.leave()
        if not status.ok():
            check(status, f"{pages_text(pages)}, imm {imm}")
        return op

    def submit_read_pages(self, uint64_t cookie, uint64_t region, const int64_t[::1] source_pages not None,
                          uint64_t key, const int64_t[::1] target_pages not None, uint64_t page_bytes,
                          uint64_t source_stride, uint64_t target_stride, uint64_t source_offset,
                          uint64_t target_offset):
        """Read pages of a key into pages of a region; the index buffers are copied before this returns."""
        cdef Status status
        cdef uint64_t op = 0
        cdef PageBatch pages = page_batch(source_pages, target_pages, page_bytes, source_stride, target_stride,
                                          source_offset, target_offset)
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_read_pages(cookie, region, key, pages, &op)
        finally:
            self.leave()
        if not status.ok():
            check(status, f"read of {pages_text(pages)}")
        return op

    def submit_write_boxes(self, uint64_t cookie, uint64_t region, const int64_t[:, ::1] boxes not None, uint64_t key,
                           uint64_t[::1] sums not None, int64_t imm):
        """Write boxes, a row each of source, target, run_bytes, then sizes and strides; their sums go into `sums`.

        The rows are copied before this returns; `sums` has to stay until the op has ended.
        """
        cdef Status status
        cdef uint64_t op = 0
        cdef BoxBatch batch
        if boxes.shape[1] < 3 or boxes.shape[1] % 2 == 0 or sums.shape[0] != boxes.shape[0]:
            raise ValueError(f"boxes of shape ({boxes.shape[0]}, {boxes.shape[1]}) and {sums.shape[0]} sums")
        batch.count = <uint64_t> boxes.shape[0]
        batch.dimensions = <uint64_t> (boxes.shape[1] - 3) // 2
        batch.rows = &boxes[0, 0] if batch.count else NULL
        batch.sums = &sums[0] if batch.count else NULL
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_write_boxes(cookie, region, key, batch, imm, &op)
        finally:
            self.leave()
        if not status.ok():
            check(status, f"{batch.count} boxes of up to {batch.dimensions} dimensions of runs, imm {imm}")
        return op

    def submit_scatter(self, uint64_t cookie, uint64_t region, targets, int64_t imm):
        """Write to many targets: a sequence of (key, source offset, target offset, length)."""
        cdef Status status
        cdef uint64_t op = 0
        cdef vector[ScatterTarget] native
        cdef ScatterTarget target
        native.reserve(len(targets))
        for key, source_offset, target_offset, length in targets:
            target.key = key
            target.source_offset = source_offset
            target.target_offset = target_offset
            target.length = length
            native.push_back(target)
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_scatter(cookie, region, native.data(), native.size(), imm, &op)
        finally:
            self.leave()
        if not status.ok():
            check(status, f"scatter to {native.size()} targets, imm {imm}")
        return op

    def submit_signal(self, uint64_t cookie, peers, int64_t imm):
        """Count one arrival at each peer, without data."""
        cdef Status status
        cdef uint64_t op = 0
        cdef vector[uint64_t] native
        native.reserve(len(peers))
        for peer in peers:
            native.push_back(<uint64_t> peer)
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_signal(cookie, native.data(), native.size(), imm, &op)
        finally:
            self.leave()
        if not status.ok():
            check(status, f"signal to {native.size()} peers, imm {imm}")
        return op

    def submit_send(self, uint64_t cookie, uint64_t peer, bytes payload not None):
        """Send one small two-sided message; the payload is copied before this returns."""
        cdef Status status
        cdef uint64_t op = 0
        cdef const char* data = payload
        cdef size_t length = <size_t> len(payload)
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_send(cookie, peer, data, length, &op)
        finally:
            self.leave()
        if not status.ok():
            check(status, f"message of {length} bytes")
        return op

    def mark_stream(self, uintptr_t stream, int32_t device):
        """Mark what a CUDA stream was given so far; one later write may name the mark as `after`."""
        cdef Status status
        cdef uint64_t mark = 0
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.mark_stream(<void*> stream, device, &mark)
        finally:
            self.leave()
        check(status, f"mark of stream {stream:#x} on cuda:{device}")
        return mark

    def mark_word(self, uint64_t watch, uint64_t value):
        """Mark the moment when a watch word holds `value` or more; one later write may name it as `after`."""
        cdef Status status
        cdef uint64_t mark = 0
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.mark_word(watch, value, &mark)
        finally:
            self.leave()
        check(status, f"mark of a watch word at {value}")
        return mark

    def drop_mark(self, uint64_t mark):
        """Give a mark back that no write took: each call that named it was refused."""
        cdef NativeEngine* engine
        if self.closed_:
            return
        engine = self.enter()
        try:
            with nogil:
                engine.drop_mark(mark)
        finally:
            self.leave()

    def cancel(self, uint64_t op):
        """Stop posting an op; it drains and completes as cancelled."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.cancel(op)
        finally:
            self.leave()
        check(status, "cancel")

    def progress(self, uint64_t op):
        """Return how far an op is; `known` is False when it has ended."""
        cdef OpProgress progress = self.get().progress(op)
        return OpProgressTuple(progress.bytes_total, progress.bytes_posted, progress.bytes_done, progress.outstanding,
                               progress.peer, progress.known)

    def arm_writable(self, uint64_t cookie):
        """Ask for one WRITABLE completion when an op slot is free."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:  # it waits for the engine lock, which a pass of the worker may hold for a while
                status = engine.arm_writable(cookie)
        finally:
            self.leave()
        check(status, "arm_writable")

# memory.pxi: Python's view of engine-owned pages. The engine unmaps its pages when a region is released or the engine
# closes, and Python objects (a memoryview, a tensor over it) may live longer. So a view is a second mapping of the same
# shared pages with a life of its own. Using a view after release is then harmless: it shows the last bytes, and the
# pages are freed with the last view.
# Rejected: refusing release while views exist. A tensor in a local variable would make `async with` fail at its end.


cdef extern from "<sys/mman.h>" nogil:
    int munmap(void*, size_t) noexcept

cdef extern from "<cerrno>" nogil:
    int errno


cdef class _Pages:
    """Owner of one alias mapping, an exporter of the buffer protocol. Only `alias_of` makes one that holds memory."""

    cdef void* base_
    cdef size_t length_

    def __cinit__(self):
        self.base_ = NULL
        self.length_ = 0

    def __getbuffer__(self, Py_buffer* view, int flags):
        cdef void* base = self.base_ if self.base_ != NULL else <void*> self  # an empty buffer needs a non-null address
        PyBuffer_FillInfo(view, self, base, <Py_ssize_t> self.length_, 0, flags)

    def __dealloc__(self):
        if self.base_ != NULL:
            munmap(self.base_, self.length_)


cdef _Pages alias_of(void* base, uint64_t length):
    """Map the pages of a region a second time; refused for memory that the engine did not allocate."""
    cdef _Pages pages = _Pages.__new__(_Pages)
    if length == 0:
        return pages
    pages.base_ = alias_pages(base, length)
    if pages.base_ == NULL:
        raise status_error(Status(StatusCode.kInvalidArgument, errno),
                           "only allocated regions have engine memory; a registered buffer is its own view")
    pages.length_ = length
    return pages


cdef class _KeyPages:
    """Owner of a peer's mapped memory, an exporter of the buffer protocol: the mapping stays while there is a view."""

    cdef shared_ptr[uint8_t] held_
    cdef uint64_t length_

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.held_.get(), <Py_ssize_t> self.length_, 0, flags)

# status.pxi: the only place where a native Status becomes a Python exception. Runs with the GIL.
# The exception carries the numbers; which public error class it becomes is decided by asyncfabric._bridge.faults.


cdef object status_error(Status status, str detail):
    """Build the exception for a refused call: the table's sentence, then what is known beyond it."""
    cdef str text = (<bytes> status_text(status.code)).decode("ascii")
    if detail:
        text = f"{text}: {detail}"
    if status.raw:
        text = f"{text} [number {status.raw}]"
    return EngineStatusError(<int> <uint16_t> status.code, <int> <uint16_t> status.kind, <int> status.raw, text)


cdef inline int check(Status status, str where) except -1:
    """Raise EngineStatusError unless the call was accepted."""
    if status.ok():
        return 0
    raise status_error(status, where)


cdef int refuse_closed() except -1:
    raise status_error(Status(StatusCode.kClosed), "the engine was closed")


cdef inline bytes bytes_of(const string& value):
    """Copy native bytes into a Python object."""
    return PyBytes_FromStringAndSize(value.data(), <Py_ssize_t> value.size())


cdef inline str text_of(const string& value):
    """Decode text that a library made; a broken byte in a device name must not hide the rest."""
    return PyUnicode_DecodeUTF8(value.data(), <Py_ssize_t> value.size(), b"replace")


cdef inline string_view bytes_view(const unsigned char[::1] data) noexcept:
    """View bytes without a copy; valid while `data` is held."""
    if data.shape[0] == 0:
        return string_view()
    return string_view(<const char*> &data[0], <size_t> data.shape[0])

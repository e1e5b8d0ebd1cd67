cdef class nixl_xfer_handle:
    cdef readonly object _core, _request
    cdef public bint _released

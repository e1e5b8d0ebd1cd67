# handles.pxd: the C types of the handle of a transfer for Cython, which compiles handles.py.

from asyncfabric.integrations.nixl.request cimport Request


cdef class nixl_xfer_handle:
    cdef readonly object _core
    cdef readonly Request _request
    cdef public bint _released

# remotes.pxd: the C types of RemoteAgent for Cython, which compiles remotes.py.

from asyncfabric.integrations.nixl.note_slots cimport NoteSlots


cdef class RemoteAgent:
    cdef readonly object name, address, notes
    cdef public object connected
    cdef public bint removed
    cdef public NoteSlots slots
    cdef object _fabric, _lock, _serial, _packed, _table
    cdef dict _keys

    cpdef peer(self)

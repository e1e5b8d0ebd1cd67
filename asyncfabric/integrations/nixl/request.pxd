# request.pxd: the C types of Request for Cython, which compiles request.py.

cimport cython

from asyncfabric.integrations.nixl.note_exchange cimport NoteExchange
from asyncfabric.integrations.nixl.note_slots cimport NoteSlot, NoteSlots
from asyncfabric.integrations.nixl.remotes cimport RemoteAgent


cdef class Request:
    cdef object _core, _dispatcher, _fabric, _failure, _lock
    cdef NoteExchange _exchange
    cdef RemoteAgent _remote
    cdef bytes _note
    cdef bint _early, _on_gpu, _note_due
    cdef object _begun_ns, _posted_ns, _ended_ns
    cdef int _state
    cdef list _slots
    cdef readonly list _transfers
    cdef readonly tuple _steps
    cdef readonly object count, operation, total_bytes

    @cython.locals(exchange=NoteExchange, slots=NoteSlots, slot=NoteSlot)
    cpdef bint post(self, bytes note) except -1
    cpdef bint check(self) except -1
    cdef bint _advance(self) except -1
    cdef _refuse(self, int state)
    @cython.locals(slot=NoteSlot)
    cdef _end_slot(self, bint well)
    cdef _fail(self, failure)

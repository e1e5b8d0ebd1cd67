cdef class Request:
    cdef object _core, _failure, _lock, _note, _remote
    cdef list _slots
    cdef readonly list _transfers
    cdef readonly tuple _steps
    cdef object _begun_ns, _posted_ns, _ended_ns
    cdef bint _note_due
    cdef int _state
    cdef readonly object count, operation

    cpdef bint post(self, bytes note) except -1
    cpdef bint check(self) except -1
    cdef bint _advance(self) except -1
    cdef _refuse(self, int state)
    cdef _fail(self, failure)

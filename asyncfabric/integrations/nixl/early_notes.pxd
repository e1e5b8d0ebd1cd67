cdef class _Slot:
    cdef public object peer, counter
    cdef public list notes


cdef class EarlyNotes:
    cdef object _open_counter, _most_slots, _next
    cdef dict _slots, _withdrawn
    cdef set _waiting
    cdef list _ended
    cdef readonly dict peers
    cdef readonly object dropped

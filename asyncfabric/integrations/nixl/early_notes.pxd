# early_notes.pxd: the C types of the notes that wait for Cython, which compiles early_notes.py.

cdef class _Slot:
    cdef readonly object peer, counter
    cdef public list notes


cdef class EarlyNotes:
    cdef object _open_counter, _most_slots, _next
    cdef dict _slots, _withdrawn
    cdef set _waiting
    cdef list _ended
    cdef readonly dict peers
    cdef readonly object dropped

    cpdef bint take_in(self, peer, note) except -1
    cpdef list ready(self)

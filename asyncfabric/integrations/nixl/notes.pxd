# notes.pxd: the C types of the queue of notes for Cython, which compiles notes.py.

cdef class NoteQueue:
    cdef object _most_notes, _most_bytes, _lock, _bytes, _dropped
    cdef readonly object waiting, _unfinished

    cpdef hand_over(self, list parts, into)
    cdef list _whole(self, list parts)

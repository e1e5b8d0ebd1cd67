cdef class NoteQueue:
    cdef object _most_notes, _most_bytes, _lock
    cdef readonly object _unfinished
    cdef readonly object waiting
    cdef object _bytes, _dropped

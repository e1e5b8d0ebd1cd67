cdef class NoteSlot:
    cdef public object owner, number, imm, count, ended


cdef class NoteSlots:
    cdef public object peer, at_once_bytes, granted
    cdef object _free

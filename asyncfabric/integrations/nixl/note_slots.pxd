# note_slots.pxd: the C types of the slots of a target for Cython, which compiles note_slots.py.

cdef class NoteSlot:
    cdef readonly NoteSlots owner
    cdef readonly object number, imm
    cdef public object count, ended


cdef class NoteSlots:
    cdef readonly object peer
    cdef public object at_once_bytes
    cdef public bint granted
    cdef object _free

    cpdef learn(self, size, bint at_once)
    cpdef NoteSlot take(self)
    cpdef give_back(self, NoteSlot slot)

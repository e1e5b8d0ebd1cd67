# note_exchange.pxd: the C types of NoteExchange for Cython, which compiles note_exchange.py.

from asyncfabric.integrations.nixl.early_notes cimport EarlyNotes
from asyncfabric.integrations.nixl.note_slots cimport NoteSlot, NoteSlots
from asyncfabric.integrations.nixl.notes cimport NoteQueue
from asyncfabric.integrations.nixl.remotes cimport RemoteAgent


cdef class NoteExchange:
    cdef readonly NoteQueue queue
    cdef readonly EarlyNotes early
    cdef readonly object refused
    cdef object _title, _name, _fabric, _dispatcher, _wait_for_room, _messages, _numbers, _collecting, _outbox, _lock
    cdef public object _look_at_senders
    cdef dict _slots

    cpdef send(self, RemoteAgent remote, bytes note)
    cpdef NoteSlots slots_for(self, RemoteAgent remote, bytes note)
    cpdef bint send_early(self, RemoteAgent remote, NoteSlot slot, bytes note) except -1
    cpdef end(self, NoteSlot slot, bint well)
    cpdef take(self, into)
    cpdef flush(self)
    cdef list _look(self)
    cdef list _sorted_out(self, list received)
    cdef _lost(self)
    cdef _submit(self, RemoteAgent remote, bytes message, bytes note)

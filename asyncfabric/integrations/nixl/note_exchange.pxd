cdef class NoteExchange:
    cdef readonly object queue, early
    cdef readonly object refused
    cdef object _title, _name, _fabric, _dispatcher, _wait_for_room, _messages, _numbers, _collecting
    cdef public object _look_at_senders
    cdef object _outbox, _lock
    cdef dict _slots

    cdef list _look(self)
    cdef list _sorted_out(self, list received)
    cdef _lost(self)
    cdef _submit(self, remote, bytes message, bytes note)

cdef class RemoteAgent:
    cdef public object name, address, removed, slots, notes
    cdef object _fabric, _lock, _peer, _serial, _packed, _table
    cdef dict _keys

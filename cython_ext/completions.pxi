# completions.pxi: from the completion ring to Python tuples. One consumer at a time, with the GIL, since
# a poll is a copy out of a ring and never blocks.


cdef extern from *:
    """
    namespace asyncfabric {
    // tuple.__new__(cls, fields): 100 ns each, against 210 ns through the class and 56 ns for a tuple without names.
    inline PyObject* named_tuple(PyObject* cls, PyObject* arguments) {
      return PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(cls), arguments, nullptr);
    }
    }  // namespace asyncfabric
    """
    object named_tuple "asyncfabric::named_tuple"(object, tuple)


cdef enum:
    POLL_BATCH = 128  # 128 completions are 9 KiB of stack


cdef inline object completion_tuple(const Completion& native):
    """Build one `Completion` without going through its Python-level constructor."""
    cdef tuple fields = (
        native.cookie,
        <uint32_t> native.kind,
        <uint16_t> native.status.code,
        <uint16_t> native.status.kind,
        native.status.raw,
        native.value,
        native.bytes,
        native.duration_ns,
        native.rails,
        native.peer,
    )
    return named_tuple(CompletionTuple, (fields,))


cdef list message_tuples(const vector[ReceivedMessage]& taken):
    """Build the (peer id, payload) of each message."""
    cdef list out = []
    cdef size_t i
    for i in range(taken.size()):
        out.append((taken[i].peer, bytes_of(taken[i].payload)))
    return out


cdef class _CompletionRoom(_CounterRoom):
    """Completions, messages, manual stepping, trace. Not public: a layer of `Engine`."""

    def completion_fd(self):
        """Return the fd that is readable when armed and something came."""
        return self.get().completion_fd()

    def arm(self):
        """Arm the fd before sleeping; False when completions are waiting already. May linger for them a moment."""
        cdef cpp_bool armed = False
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                armed = engine.arm()
        finally:
            self.leave()
        return armed

    def disarm(self):
        """Clear the fd after a wake-up, and do what a sleeping worker was not woken for; a clear fd is no error."""
        self.get().disarm()

    def assist(self):
        """Bring on what is under way, in a thread that polls; copies at most 1 ms, with the GIL released."""
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                engine.assist()
        finally:
            self.leave()

    def look(self):
        """Return whether completions are there for poll(); while there are none, assist() first."""
        cdef cpp_bool came = False
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                came = engine.look()
        finally:
            self.leave()
        return came

    def poll(self, Py_ssize_t limit):
        """Return up to `limit` completions, oldest first; never blocks."""
        cdef Completion batch[POLL_BATCH]
        cdef NativeEngine* engine = self.get()
        cdef list out = []
        cdef size_t wanted, got, i
        while limit > 0:
            wanted = min(<size_t> limit, <size_t> POLL_BATCH)
            got = engine.poll(batch, wanted)
            for i in range(got):
                out.append(completion_tuple(batch[i]))
            if got < wanted:
                break
            limit -= <Py_ssize_t> got
        return out

    def take_messages(self, Py_ssize_t limit, bint assist=False):
        """Return up to `limit` two-sided messages that are here, (peer id, payload) each; never waits.

        With `assist` what is under way is brought on first, as assist() does.
        """
        cdef vector[ReceivedMessage] taken
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                if assist:
                    engine.assist()
                engine.take_messages(<size_t> max(limit, 0), &taken)
        finally:
            self.leave()
        return message_tuples(taken)

    def spin_messages(self, Py_ssize_t limit, uint64_t deadline_ns):
        """Spin until there is a message, then return up to `limit`; `deadline_ns` is as for spin_counter.

        Raises EngineStatusError: kTimeout at the deadline, kClosed when another thread closes.
        """
        cdef Status status
        cdef vector[ReceivedMessage] taken
        cdef uint64_t slice_end
        cdef NativeEngine* engine
        while True:
            engine = self.enter()
            try:
                with nogil:
                    slice_end = min(deadline_ns, steady_ns() + SPIN_SLICE_NS)
                    status = engine.spin_messages(<size_t> max(limit, 1), slice_end, &taken)
            finally:
                self.leave()
            if status.ok():
                return message_tuples(taken)
            if status.code != StatusCode.kTimeout or slice_end >= deadline_ns:
                check(status, "no message came")
            PyErr_CheckSignals()

    def step(self):
        """Run one pass of the engine (manual polling); returns how many things happened."""
        cdef size_t happened = 0
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                happened = engine.step()
        finally:
            self.leave()
        return happened

    def set_trace(self, bint on):
        """Turn the trace points on or off; they cost a branch each while off."""
        self.get().set_trace(on)

    def take_trace(self):
        """Return the newest trace events, oldest first, as (time_ns, what, subject, value)."""
        cdef vector[TraceEvent] events
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                events = engine.take_trace()
        finally:
            self.leave()
        return [(event.time_ns, <uint64_t> event.what, event.subject, event.value) for event in events]

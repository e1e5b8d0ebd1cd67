# hold.pxi: who owns the native engine and when it may die. Runs with the GIL.
# The destructor joins the engine's threads, so it runs without the GIL and never while another Python thread is inside
# a call that gave the GIL up. `calls_` and `closed_` change only under the GIL; a call that keeps the GIL needs
# neither, since close() cannot run beside it.


cdef extern from *:
    """
    #include <time.h>
    #include <unistd.h>

    namespace asyncfabric {
    inline void delete_engine(Engine* engine) noexcept { delete engine; }

    // A condition variable would need the GIL on one side; close() is rare and waits only for other threads' calls.
    inline void nap_ns(long nanoseconds) noexcept {
      timespec pause{0, nanoseconds};
      nanosleep(&pause, nullptr);
    }
    }  // namespace asyncfabric
    """
    void delete_engine "asyncfabric::delete_engine"(NativeEngine*) noexcept nogil
    void nap_ns "asyncfabric::nap_ns"(long) noexcept nogil
    int getpid() noexcept nogil


cdef enum:
    CLOSE_POLL_NS = 200_000


cdef class _Hold:
    """Owner of one native engine. Not public: users hold `Engine`."""

    cdef NativeEngine* engine_
    cdef int calls_
    cdef bint closed_
    cdef int pid_
    cdef unordered_map[uint64_t, uint64_t*] words_  # watch id -> its word; erased when the watch closes
    cdef object __weakref__

    def __cinit__(self):
        self.engine_ = NULL
        self.calls_ = 0
        self.closed_ = True
        self.pid_ = getpid()

    cdef inline NativeEngine* get(self) except NULL:
        """Return the engine for a call that keeps the GIL."""
        if self.closed_:
            refuse_closed()
        return self.engine_

    cdef inline NativeEngine* enter(self) except NULL:
        """Return the engine for a call that gives up the GIL; leave() must follow, whatever happens."""
        if self.closed_:
            refuse_closed()
        self.calls_ += 1
        return self.engine_

    cdef inline void leave(self) noexcept:
        self.calls_ -= 1

    def close(self):
        """Stop the engine and join its threads; idempotent. Calls of other threads end first, spins with `closed`.

        What was not drained by submit_close is stopped here: after return nothing touches registered memory.
        """
        self.closed_ = True
        while self.calls_ > 0:
            with nogil:
                nap_ns(CLOSE_POLL_NS)
        self.destroy()

    cdef void destroy(self) noexcept:
        cdef NativeEngine* engine = self.engine_
        self.engine_ = NULL
        # After fork() the child holds a copy without threads: joining them would hang, so the copy is left alone.
        if engine != NULL and self.pid_ == getpid():
            with nogil:
                delete_engine(engine)

    def __dealloc__(self):
        self.closed_ = True
        self.destroy()

    def leave_to_parent(self):
        """Refuse every call from here on: this process is a forked copy, which has none of the engine's threads.

        What the copy did would reach memory that the parent and its peers share.
        """
        self.closed_ = True
        self.calls_ = 0  # threads that were inside a call are not here

    @property
    def closed(self):
        """True once close() was called."""
        return self.closed_


_open_holds = weakref.WeakSet()


def _leave_copies():
    """Run in the child of a fork, before anything else of it."""
    for hold in tuple(_open_holds):
        hold.leave_to_parent()


os.register_at_fork(after_in_child=_leave_copies)

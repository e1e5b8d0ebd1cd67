# counters.pxi: ImmCounters and watch words. A spin gives up the GIL in slices, so that Ctrl-C, close() and other Python
# threads get through; within a slice nothing of Python runs.


cdef extern from *:
    """
    namespace asyncfabric {
    // Partners: the engine's worker, CPU threads and GPU kernels that store to the same watch word.
    inline uint64_t load_word(const uint64_t* word) noexcept { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
    inline void store_word(uint64_t* word, uint64_t value) noexcept { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

    // The clock of the engine's deadlines (std::chrono::steady_clock, CLOCK_MONOTONIC, time.monotonic_ns).
    inline uint64_t steady_ns() noexcept {
      timespec now{};
      clock_gettime(CLOCK_MONOTONIC, &now);
      return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
    }
    }  // namespace asyncfabric
    """
    uint64_t load_word "asyncfabric::load_word"(const uint64_t*) noexcept nogil
    void store_word "asyncfabric::store_word"(uint64_t*, uint64_t) noexcept nogil
    uint64_t steady_ns "asyncfabric::steady_ns"() noexcept nogil


cdef enum:
    SPIN_SLICE_NS = 50_000_000


cdef class _CounterRoom(_DataRoom):
    """Counters and watch words. Not public: a layer of `Engine`."""

    def open_counter(self, int64_t imm):
        """Open a counter; -1 lets the engine pick a free imm. Returns (counter id, imm)."""
        cdef Status status
        cdef uint64_t counter = 0
        cdef uint32_t chosen = 0
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.open_counter(imm, &counter, &chosen)
        finally:
            self.leave()
        check(status, f"counter with imm {imm}")
        return counter, chosen

    def close_counter(self, uint64_t counter):
        """Close a counter: later arrivals are stale."""
        cdef NativeEngine* engine
        if self.closed_:
            return
        engine = self.enter()
        try:
            with nogil:
                engine.close_counter(counter)
        finally:
            self.leave()

    def arm_closed(self, uint64_t cookie, uint32_t imm):
        """Ask for one CONTROL completion when no peer has to confirm the close of the last counter of imm."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.arm_closed(cookie, imm)
        finally:
            self.leave()
        check(status, f"imm {imm}")

    def closings(self, int64_t imm):
        """Return the closed counters that peers have not confirmed, at most 64; -1: of any imm."""
        cdef vector[ClosingInfo] found
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                found = engine.closings(imm)
        finally:
            self.leave()
        return [ClosingInfoTuple(info.imm, info.age_ns, tuple(info.peers)) for info in found]

    def counter_value(self, uint64_t counter):
        """Return the count now."""
        return self.get().counter_value(counter)

    def arm_counter(self, uint64_t counter, uint64_t cookie, uint64_t target):
        """Ask for one COUNTER completion when the count reaches target; replaces an earlier arming."""
        check(self.get().arm_counter(counter, cookie, target), f"counter armed for {target}")

    def spin_counter(self, uint64_t counter, uint64_t target, uint64_t deadline_ns):
        """Spin until the count reaches target; `deadline_ns` is on the clock of time.monotonic_ns().

        Returns the value; raises EngineStatusError: kTimeout at the deadline, kClosed when another thread closes.
        """
        cdef Status status
        cdef uint64_t value = 0
        cdef uint64_t slice_end
        cdef NativeEngine* engine
        while True:
            engine = self.enter()
            try:
                with nogil:
                    slice_end = min(deadline_ns, steady_ns() + SPIN_SLICE_NS)
                    status = engine.spin_counter(counter, target, slice_end, &value)
            finally:
                self.leave()
            if status.ok():
                return value
            if status.code != StatusCode.kTimeout or slice_end >= deadline_ns:
                check(status, f"counter at {value} of {target}")
            PyErr_CheckSignals()

    def counter_flag(self, uint64_t counter):
        """Return the address of the counter's flag, a word that kernels may spin on."""
        cdef uint64_t* word = NULL
        check(self.get().counter_flag(counter, &word), "counter flag")
        return <uintptr_t> word

    def stream_wait(self, uint64_t counter, uintptr_t stream, int32_t device, uint64_t target):
        """Make a CUDA stream wait until the count reaches target."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.stream_wait(counter, <void*> stream, device, target)
        finally:
            self.leave()
        check(status, f"stream {stream:#x} of cuda:{device} waiting for {target}")

    def open_watch(self):
        """Open a 64-bit word that starts at 0; returns (watch id, address of the word)."""
        cdef Status status
        cdef uint64_t watch = 0
        cdef uint64_t* word = NULL
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.open_watch(&watch, &word)
        finally:
            self.leave()
        check(status, "watch")
        self.words_[watch] = word
        return watch, <uintptr_t> word

    cdef uint64_t* word(self, uint64_t watch) except NULL:
        """Return the word of an open watch; a closed one is refused, never followed."""
        self.get()
        if self.words_.count(watch) == 0:
            raise status_error(Status(StatusCode.kClosed), "the watch was closed")
        return self.words_[watch]

    def watch_load(self, uint64_t watch):
        """Return the word now."""
        return load_word(self.word(watch))

    def watch_store(self, uint64_t watch, uint64_t value):
        """Store the word and wake the worker if it sleeps."""
        cdef NativeEngine* engine
        store_word(self.word(watch), value)
        engine = self.enter()
        try:
            with nogil:
                engine.notify()
        finally:
            self.leave()

    def arm_watch(self, uint64_t watch, uint64_t cookie, uint64_t seen):
        """Ask for one WATCH completion when the word differs from `seen`."""
        self.word(watch)
        check(self.get().arm_watch(watch, cookie, seen), "arm_watch")

    def close_watch(self, uint64_t watch):
        """Close a watch; its word must not be touched any more."""
        cdef NativeEngine* engine
        if self.closed_ or self.words_.erase(watch) == 0:
            return
        engine = self.enter()
        try:
            with nogil:
                engine.close_watch(watch)
        finally:
            self.leave()

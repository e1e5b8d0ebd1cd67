# engine.pxi: the class that Python holds: opening, and what people ask it about itself.


cdef extern from *:
    """
    #ifndef ASYNCFABRIC_BUILD_VERSION
    #error "build with setup.py, which knows the version"
    #endif
    #ifdef __clang__
    #define ASYNCFABRIC_BUILD_COMPILER __VERSION__
    #else
    #define ASYNCFABRIC_BUILD_COMPILER "GCC " __VERSION__
    #endif
    #ifndef __GLIBC__
    #define __GLIBC__ 0
    #define __GLIBC_MINOR__ 0
    #endif
    """
    const char* BUILD_COMPILER "ASYNCFABRIC_BUILD_COMPILER"
    int GLIBC "__GLIBC__"
    int GLIBC_MINOR "__GLIBC_MINOR__"
    const char* BUILD_VERSION "ASYNCFABRIC_BUILD_VERSION"
    const char* BUILD_SANITIZE "ASYNCFABRIC_BUILD_SANITIZE"
    int BUILD_DEBUG "ASYNCFABRIC_BUILD_DEBUG"


cdef class Engine(_CompletionRoom):
    """The compiled engine behind `asyncfabric._bridge.engine.Engine`; opens rails and starts its threads when made."""

    cdef tuple left_out_

    def __init__(self, config, chosen=None, left_out=()):
        if chosen is None:
            chosen = [(spec, "named", False) for spec in config.rail_specs()]
        cdef EngineConfig native = engine_config(config, chosen)
        cdef unique_ptr[NativeEngine] opened
        cdef string detail
        cdef Status status
        if self.engine_ != NULL or not self.closed_:
            raise RuntimeError("an Engine is opened once")
        with nogil:
            status = NativeEngine.open(native, &opened, &detail)
        if not status.ok():
            raise status_error(status, text_of(detail))
        self.left_out_ = tuple(left_out)
        self.engine_ = opened.release()
        self.closed_ = False
        _open_holds.add(self)

    def __repr__(self):
        if self.closed_:
            return "<asyncfabric Engine, closed>"
        return f"<asyncfabric Engine {self.engine_.incarnation():#x}>"

    def address(self):
        """Return the address bytes that peers connect to."""
        return bytes_of(self.get().address())

    def incarnation(self):
        """Return the random number of this engine's life."""
        return self.get().incarnation()

    def last_error(self):
        """Return the newest detail text of a failed control call."""
        return text_of(self.get().last_error())

    def reason(self, uint64_t cookie):
        """Return why a data call ended badly, where more is known than its status; of the newest 64 such calls."""
        return text_of(self.get().reason(cookie))

    def rails(self):
        """Return what was opened, one dict per rail with the fields of asyncfabric.types.RailInfo."""
        cdef vector[RailInfo] rails
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                rails = engine.rails()
        finally:
            self.leave()
        return [
            {
                "provider": text_of(rail.provider),
                "device": text_of(rail.device),
                "library": text_of(rail.library),
                "version": text_of(rail.version),
                "gbits_per_s": rail.gbits_per_s,
                "ordered": bool(rail.ordered),
                "can_read": bool(rail.can_read),
                "can_gather": bool(rail.can_gather),
                "up": bool(rail.up),
                "reason": text_of(rail.reason),
                "admission": text_of(rail.admission),
            }
            for rail in rails
        ]

    def rails_left_out(self):
        """Return what was not chosen or could not be opened, one dict each with the fields of RailLeftOut."""
        cdef vector[LeftOutRail] rails
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                rails = engine.rails_left_out()
        finally:
            self.leave()
        refused = [{"rail": text_of(rail.rail), "reason": text_of(rail.reason)} for rail in rails]
        return [*refused, *self.left_out_]

    def peers(self):
        """Return the peers, one dict each with the fields of PeerStatistics; `state` is a number."""
        cdef vector[PeerInfo] peers
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                peers = engine.peers()
        finally:
            self.leave()
        return [
            {
                "id": peer.id,
                "incarnation": peer.incarnation,
                "state": peer.state,
                "lanes": peer.lanes,
                "provider": text_of(peer.provider),
                "bytes_sent": peer.bytes_sent,
                "ops_in_flight": peer.ops_in_flight,
            }
            for peer in peers
        ]

    def statistics(self):
        """Return the engine's counters since it was opened, by the names of the native EngineStatistics."""
        cdef EngineStatistics now
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                now = engine.statistics()
        finally:
            self.leave()
        return {
            "ops_submitted": now.ops_submitted,
            "ops_completed": now.ops_completed,
            "ops_failed": now.ops_failed,
            "ops_cancelled": now.ops_cancelled,
            "bytes_written": now.bytes_written,
            "bytes_read": now.bytes_read,
            "work_requests": now.work_requests,
            "immediates_sent": now.immediates_sent,
            "immediates_received": now.immediates_received,
            "stale_arrivals": now.stale_arrivals,
            "early_arrivals": now.early_arrivals,
            "messages_received": now.messages_received,
            "messages_refused": now.messages_refused,
            "steps": now.steps,
            "sleeps": now.sleeps,
            "loop_wakes": now.loop_wakes,
            "inline_steps": now.inline_steps,
            "regions": now.regions,
            "registered_bytes": now.registered_bytes,
            "peers": now.peers,
            "quarantined_regions": now.quarantined_regions,
            "unconfirmed_closes": now.unconfirmed_closes,
        }


def build_info():
    """Return what was compiled in: `version`, `providers`, `compiler`, `glibc` of its headers, `sanitize`, `debug`."""
    return {
        "version": (<bytes> BUILD_VERSION).decode(),
        "providers": tuple(text_of(name) for name in provider_names()),
        "compiler": (<bytes> BUILD_COMPILER).decode(),
        "glibc": f"{GLIBC}.{GLIBC_MINOR}",
        "sanitize": (<bytes> BUILD_SANITIZE).decode(),
        "debug": bool(BUILD_DEBUG),
    }

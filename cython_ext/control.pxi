# control.pxi: control calls and look-ups. Control calls queue work for the engine's control thread and end as CONTROL
# completions; the GIL is given up where the engine may take a lock or wake a thread.


cdef class _ControlRoom(_Hold):
    """Regions, keys, peers. Not public: a layer of `Engine`."""

    def submit_register(self, uint64_t cookie, uint64_t address, uint64_t length, int32_t device, uint32_t access):
        """Register memory that the caller keeps alive until release has ended."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_register(cookie, <void*> <uintptr_t> address, length, device, access)
        finally:
            self.leave()
        check(status, f"register of {length} bytes at {address:#x}, device {device}")

    def submit_allocate(self, uint64_t cookie, uint64_t length, int32_t device, uint32_t access):
        """Allocate engine-owned pages and register them."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_allocate(cookie, length, device, access)
        finally:
            self.leave()
        check(status, f"allocation of {length} bytes, device {device}")

    def submit_revoke(self, uint64_t cookie, uint64_t region):
        """Start a new generation of a region: every key handed out so far is dead when it completes."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_revoke(cookie, region)
        finally:
            self.leave()
        check(status, "revoke")

    def submit_release(self, uint64_t cookie, uint64_t region):
        """Deregister; completes when nothing can touch the memory any more."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_release(cookie, region)
        finally:
            self.leave()
        check(status, "release")

    def submit_connect(self, uint64_t cookie, const unsigned char[::1] address not None):
        """Connect to the fabric behind address bytes; the completion's value is the peer id."""
        cdef Status status
        cdef string_view view = bytes_view(address)
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_connect(cookie, view)
        finally:
            self.leave()
        check(status, f"address of {address.shape[0]} bytes")

    def submit_disconnect(self, uint64_t cookie, uint64_t peer):
        """Flush and drop a peer."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_disconnect(cookie, peer)
        finally:
            self.leave()
        check(status, "disconnect")

    def submit_close(self, uint64_t cookie, bint cancel_unposted):
        """Drain within the drain deadline; ends as a CLOSED completion. close() joins the threads afterwards."""
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.submit_close(cookie, cancel_unposted)
        finally:
            self.leave()
        check(status, "close")

    def check_address(self, const unsigned char[::1] address not None):
        """Parse address bytes and return their incarnation; hostile bytes are refused."""
        cdef uint64_t incarnation = 0
        check(NativeEngine.check_address(bytes_view(address), &incarnation), f"address of {address.shape[0]} bytes")
        return incarnation

    cdef int look_up(self, uint64_t region, RegionInfo* info) except -1:
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.region_info(region, info)
        finally:
            self.leave()
        return check(status, "region")

    def region_info(self, uint64_t region):
        """Return the region as the engine sees it."""
        cdef RegionInfo info
        self.look_up(region, &info)
        return RegionInfoTuple(<uintptr_t> info.base, info.length, info.device, info.access, info.generation,
                               info.quarantined, text_of(info.refused))

    def region_key(self, uint64_t region, uint32_t access, uint64_t offset, uint64_t length, bint strict=False):
        """Return the key bytes of a range of a region; a strict one is enforced where the bytes land."""
        cdef string key
        cdef Status status
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.region_key(region, access, offset, length, strict, &key)
        finally:
            self.leave()
        check(status, f"key of [{offset}, {offset + length})")
        return bytes_of(key)

    def region_memory(self, uint64_t region):
        """Return writable bytes of an allocated host region. See memory.pxi: they outlive release() and close()."""
        cdef RegionInfo info
        self.look_up(region, &info)
        if info.device != kHostDevice:
            raise status_error(Status(StatusCode.kInvalidArgument), f"device {info.device} has no host memory")
        return memoryview(alias_of(info.base, info.length))

    def open_key(self, const unsigned char[::1] key not None):
        """Parse key bytes; returns (key id, KeyInfo). Hostile bytes are refused."""
        cdef uint64_t opened = 0
        cdef KeyInfo info
        cdef Status status
        cdef string_view view = bytes_view(key)
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                status = engine.open_key(view, &opened, &info)
        finally:
            self.leave()
        check(status, f"key of {key.shape[0]} bytes")
        return opened, KeyInfoTuple(info.incarnation, info.region, info.generation, info.length, info.access,
                                    info.rails)

    def close_key(self, uint64_t key):
        """Forget an opened key."""
        cdef NativeEngine* engine
        if self.closed_:
            return
        engine = self.enter()
        try:
            with nogil:
                engine.close_key(key)
        finally:
            self.leave()

    def peer_of_key(self, uint64_t key):
        """Return the peer id of the key's owner, 0 while it was never connected."""
        cdef uint64_t peer = 0
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                peer = engine.peer_of_key(key)
        finally:
            self.leave()
        return peer

    def key_memory(self, uint64_t key):
        """Return the writable bytes behind a key where this process has them mapped, else None."""
        cdef _KeyPages pages = _KeyPages.__new__(_KeyPages)
        cdef NativeEngine* engine = self.enter()
        try:
            with nogil:
                pages.held_ = engine.key_memory(key, &pages.length_)
        finally:
            self.leave()
        if pages.held_.get() == NULL:
            return None
        return memoryview(pages)

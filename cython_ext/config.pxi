# config.pxi: FabricConfig into EngineConfig. Values were checked when the FabricConfig was made; nothing is decided
# here except units: seconds and microseconds become nanoseconds.


cdef uint64_t nanoseconds(double seconds) noexcept:
    return <uint64_t> (seconds * 1e9 + 0.5)


cdef EngineConfig engine_config(object config, object chosen) except *:
    """Translate the public configuration, with the rails that were chosen. `require` is policy and stays in Python."""
    cdef EngineConfig native
    cdef RailSpec rail
    native.automatic = config.automatic
    for spec, reason, optional in chosen:
        rail.reason = reason.encode()
        rail.optional = optional
        rail.provider = spec.provider.encode()
        rail.device = spec.device.encode()
        rail.options.clear()
        for name, value in spec.options:
            rail.options.push_back(pair[string, string](<string> name.encode(), <string> value.encode()))
        native.rails.push_back(rail)
    native.polling = <PollingMode> <uint32_t> POLLING_NUMBERS[config.polling]
    native.spin_ns = nanoseconds(config.spin_us * 1e-6)
    native.drain_deadline_ns = nanoseconds(config.drain_deadline)
    native.connect_deadline_ns = nanoseconds(config.connect_deadline)
    native.peer_deadline_network_ns = nanoseconds(config.peer_deadline_network)
    native.peer_deadline_host_ns = nanoseconds(config.peer_deadline_host)
    native.stripe_bytes = config.stripe_bytes
    native.inline_bytes = config.inline_bytes
    native.max_ops = config.max_ops
    native.worker_cpu = config.worker_cpu
    native.secret = <string> secret_bytes(config.secret)
    return native

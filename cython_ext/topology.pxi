# topology.pxi: the machine's GPUs, NICs, NUMA nodes and CPUs as plain dicts; asyncfabric.observe.topology names them.
# The GIL is released while files are read. Names of files are bytes, so odd ones are shown with replacements.


cdef list plain_numbers(const vector[uint32_t]& numbers):
    cdef size_t i
    return [numbers[i] for i in range(numbers.size())]


cdef list plain_texts(const vector[string]& texts):
    cdef size_t i
    return [text_of(texts[i]) for i in range(texts.size())]


cdef dict plain_place(const Place& place):
    return {"address": text_of(place.address), "path": plain_texts(place.path), "numa_node": place.numa_node}


cdef list distance_table(const Topology& topology):
    """Return the numbers of Distance, a row for each GPU and a column for each NIC."""
    cdef size_t gpu, nic
    return [
        [
            <uint32_t> distance_between(topology.gpus[gpu].place, topology.nics[nic].place)
            for nic in range(topology.nics.size())
        ]
        for gpu in range(topology.gpus.size())
    ]


def read_topology(str root) -> dict:
    """Read the tree below `root` ("/" is this machine) and return it with the choices made for it."""
    cdef string path = root.encode("utf-8", "surrogateescape")
    cdef Topology topology
    cdef size_t i
    with nogil:
        topology = read_topology_tree(path)
    nodes = [
        {
            "id": topology.nodes[i].id,
            "cpus": plain_numbers(topology.nodes[i].cpus),
            "distances": plain_numbers(topology.nodes[i].distances),
            "memory_bytes": topology.nodes[i].memory_bytes,
            "nics": plain_numbers(nics_for_node_of(topology, topology.nodes[i].id)),
        }
        for i in range(topology.nodes.size())
    ]
    gpus = [
        {
            "place": plain_place(topology.gpus[i].place),
            "device_id": topology.gpus[i].device_id,
            "driver": text_of(topology.gpus[i].driver),
            "model": text_of(topology.gpus[i].model),
        }
        for i in range(topology.gpus.size())
    ]
    nics = [
        {
            "name": text_of(topology.nics[i].name),
            "kind": <uint32_t> topology.nics[i].kind,
            "place": plain_place(topology.nics[i].place),
            "netdevs": plain_texts(topology.nics[i].netdevs),
            "gbits_per_s": topology.nics[i].gbits_per_s,
            "up": bool(topology.nics[i].up),
            "software": bool(topology.nics[i].software),
            "virtual_function": bool(topology.nics[i].virtual_function),
        }
        for i in range(topology.nics.size())
    ]
    groups = [
        {
            "gpu": topology.groups[i].gpu,
            "nics": plain_numbers(topology.groups[i].nics),
            "numa_node": topology.groups[i].numa_node,
            "cpus": plain_numbers(topology.groups[i].cpus),
            "cpus_are_near": bool(topology.groups[i].cpus_are_near),
            "worker_cpu": topology.groups[i].worker_cpu,
        }
        for i in range(topology.groups.size())
    ]
    return {
        "nodes": nodes,
        "allowed_cpus": plain_numbers(topology.allowed_cpus),
        "gpus": gpus,
        "nics": nics,
        "groups": groups,
        "spare_nics": plain_numbers(topology.spare_nics),
        "notes": plain_texts(topology.notes),
        "distances": distance_table(topology),
    }

"""Which rails `rails="auto"` opens on a machine, and why: a pure function of its topology and of what the process uses.

Any thread. Nothing here opens a device or reads a file; `asyncfabric._bridge.native` asks when an engine is opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncfabric._bridge.machine import DISTANCE_TEXTS, NativeNic, NativeTopology, NicKind
from asyncfabric.config import RailSpec
from asyncfabric.types import RailLeftOut

MOST_NICS = 8
"""NICs that one fabric opens unnamed: each registers all memory of the fabric, and every pass looks at each."""

_PROVIDER_OF_KIND = {NicKind.INFINIBAND: "verbs", NicKind.ROCE: "verbs", NicKind.EFA: "efa"}
NOT_BUILT = "not in this build"


@dataclass(frozen=True, slots=True)
class GpuInUse:
    """The GPU whose context this process has: its number in this process, its PCI address as lspci -D prints it."""

    ordinal: int
    address: str


@dataclass(frozen=True, slots=True)
class ChosenRail:
    """A rail to open, and why."""

    spec: RailSpec
    reason: str

    @property
    def text(self) -> str:
        """The rail as a user would name it."""
        return _rail_text(self.spec.provider, self.spec.device)


@dataclass(frozen=True, slots=True)
class RailChoice:
    """What is to be opened, those for this host first, and what is not even tried."""

    rails: tuple[ChosenRail, ...]
    left_out: tuple[RailLeftOut, ...]


def choose_rails(
    topology: NativeTopology | None,
    gpu: GpuInUse | None,
    built: Iterable[str],
    named: Iterable[str] = (),
    require: Iterable[str] = (),
) -> RailChoice:
    """Choose the rails of a fabric.

    Args:
        topology: of the machine; None where it has no RDMA device, which spares reading it.
        gpu: the GPU that this process uses; None: it has no CUDA context, and gets none from a rail.
        built: providers that were compiled in.
        named: providers of the rails that the user names beside "auto": of those nothing is chosen.
        require: as in FabricConfig.
    """
    choosing = _Choosing(frozenset(built), frozenset(named), frozenset(require))
    _choose_cuda(choosing, topology, gpu)
    choosing.take("local", "", "processes of this user on this host")
    _choose_nics(choosing, topology, gpu)
    choosing.leave("tcp", _why_no_tcp(topology))
    return RailChoice(tuple(choosing.rails), tuple(choosing.left_out))


class _Choosing:
    """A choice in the making."""

    def __init__(self, built: frozenset[str], named: frozenset[str], require: frozenset[str]) -> None:
        self._built, self._named, self._require = built, named, require
        self.rails: list[ChosenRail] = []
        self.left_out: list[RailLeftOut] = []

    def take(self, provider: str, device: str, reason: str) -> None:
        """Open a rail, unless the provider is named or missing."""
        if provider in self._named:
            return
        if provider in self._built and (not self._require or provider in self._require):
            self.rails.append(ChosenRail(RailSpec(provider, device), reason))
        else:
            self.leave(provider, "config.require does not permit it", device)

    def leave(self, provider: str, reason: str, device: str = "") -> None:
        """Leave a rail out."""
        if provider not in self._named:
            why = reason if provider in self._built else NOT_BUILT
            self.left_out.append(RailLeftOut(_rail_text(provider, device), why))


def _choose_cuda(choosing: _Choosing, topology: NativeTopology | None, gpu: GpuInUse | None) -> None:
    if gpu is not None:
        choosing.take("cuda", str(gpu.ordinal), "this process uses that GPU")
    elif topology is not None and not topology["gpus"]:
        choosing.leave("cuda", "this machine has no GPU")
    else:
        how = "use one before the fabric is opened, or name the rail, which makes a context: rails=('auto', 'cuda:0')"
        choosing.leave("cuda", f"this process uses no GPU: {how}")


def _choose_nics(choosing: _Choosing, topology: NativeTopology | None, gpu: GpuInUse | None) -> None:
    nics = () if topology is None else tuple(enumerate(topology["nics"]))
    rdma = [(index, nic) for index, nic in nics if nic["kind"] != NicKind.ETHERNET]
    if topology is not None and rdma:
        reasons = _reasons(topology, gpu)
        for index, nic in rdma:
            provider = _PROVIDER_OF_KIND.get(NicKind(nic["kind"]), "verbs")
            if index in reasons:
                choosing.take(provider, nic["name"], reasons[index])
            else:
                choosing.leave(provider, _why_not(topology, index, nic, gpu), nic["name"])
    present = {_PROVIDER_OF_KIND.get(NicKind(nic["kind"]), "verbs") for _, nic in rdma}
    for provider, what in (("verbs", "InfiniBand or RoCE device"), ("efa", "EFA device")):
        if provider not in present:
            choosing.leave(provider, f"this machine has no {what}")


def _reasons(topology: NativeTopology, gpu: GpuInUse | None) -> dict[int, str]:
    """Return the NICs to open, each with its reason: the GPU's, else those of the process's NUMA nodes, else all."""
    serving = _serving(topology)
    number = _number_of(topology, gpu)
    if number is not None:
        own = [nic for group in topology["groups"] if group["gpu"] == number for nic in group["nics"] if nic in serving]
        if own:
            how_far = topology["distances"][number]
            return {nic: f"the NIC of the GPU that this process uses: {DISTANCE_TEXTS[how_far[nic]]}" for nic in own}
    nodes = _own_nodes(topology)
    near = [nic for nic in serving if topology["nics"][nic]["place"]["numa_node"] in nodes]
    if near and len(near) < len(serving):
        return dict.fromkeys(near[:MOST_NICS], f"on the NUMA nodes of this process ({_listed(nodes)})")
    return dict.fromkeys(serving[:MOST_NICS], "an RDMA device of this machine")


def _serving(topology: NativeTopology) -> list[int]:
    """Return the RDMA devices that are usable and of one kind, since others reach no NIC of that kind."""
    pool = sorted({nic for group in topology["groups"] for nic in group["nics"]})
    return [nic for nic in pool if NicKind(topology["nics"][nic]["kind"]) in _PROVIDER_OF_KIND]


def _own_nodes(topology: NativeTopology) -> set[int]:
    allowed = set(topology["allowed_cpus"])
    return {node["id"] for node in topology["nodes"] if allowed.intersection(node["cpus"])}


def _number_of(topology: NativeTopology, gpu: GpuInUse | None) -> int | None:
    places = [found["place"]["address"].lower() for found in topology["gpus"]]
    return places.index(gpu.address.lower()) if gpu is not None and gpu.address.lower() in places else None


def _why_not(topology: NativeTopology, index: int, nic: NativeNic, gpu: GpuInUse | None) -> str:
    if nic["kind"] == NicKind.IWARP:
        return "iWARP has no writes with immediates, so arrivals could not be counted"
    if not nic["up"]:
        return "no port of it is active"
    if nic["virtual_function"]:
        return "its physical function is here too"
    if index not in _serving(topology):
        return "it is of another kind than the NICs with the most bandwidth, or farther from each GPU than theirs"
    number = _number_of(topology, gpu)
    if number is not None and any(group["nics"] for group in topology["groups"] if group["gpu"] == number):
        return "it serves another GPU than the one that this process uses"
    if nic["place"]["numa_node"] not in _own_nodes(topology):
        return "it is on another NUMA node than the CPUs of this process"
    return f"{MOST_NICS} NICs are opened unnamed: name it beside them, with rails=('auto', 'verbs:...', ...)"


def _why_no_tcp(topology: NativeTopology | None) -> str:
    """Return why no port is opened: everybody who reaches it could become a peer, so the network has to be named."""
    nics = sorted(topology["nics"] if topology is not None else (), key=lambda nic: nic["kind"] != NicKind.ETHERNET)
    links = [name for nic in nics if nic["up"] for name in nic["netdevs"]]
    here = f" ({', '.join(links)})" if links else ""
    return f"it listens only where it is named{here}: rails=('auto', 'tcp:{links[0] if links else 'eth0'}')"


def _rail_text(provider: str, device: str) -> str:
    return f"{provider}:{device}" if device else provider


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))

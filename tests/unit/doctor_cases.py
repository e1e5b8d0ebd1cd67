"""Facts of machines that are well and of machines that are not, for each check of `asyncfabric doctor`.

Each check must appear here with facts that it complains about: test_doctor_checks.py refuses a check that cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from asyncfabric.config import RailSpec
from asyncfabric.observe.choice import NOT_BUILT, AutomaticChoice, ChosenRail, RailChoice
from asyncfabric.observe.nvlink import NvGpu, NvLinks
from asyncfabric.observe.topology import NicKind
from asyncfabric.types import RailLeftOut
from asyncfabric_services.doctor.automatic import AutomaticFacts
from asyncfabric_services.doctor.cores import CoreFacts
from asyncfabric_services.doctor.gpu import Asking, GpuFacts
from asyncfabric_services.doctor.kernel import KernelFacts
from asyncfabric_services.doctor.libraries import Library, LibraryFacts
from asyncfabric_services.doctor.limits import UNLIMITED, LimitFacts
from asyncfabric_services.doctor.link_keys import LinkKeyFacts
from asyncfabric_services.doctor.memory import MemoryFacts
from asyncfabric_services.doctor.pcie import PcieFacts
from asyncfabric_services.doctor.ptrace import PtraceFacts
from asyncfabric_services.doctor.rdma import Gid, RdmaFacts, RdmaPort
from asyncfabric_services.doctor.trials import Trial, TrialFacts

KERNEL = KernelFacts("6.8.0", {})
CORES = CoreFacts(online=192, allowed=192, quota=None, clock="tsc", far_nics=())
LIMITS = LimitFacts(locked_bytes=UNLIMITED, may_lock=False, files=65536, most_files=65536, nics=True)
MEMORY = MemoryFacts("madvise", "never", "")
PTRACE = PtraceFacts(scope=1, error="")
FABRIC = Library("libfabric.so.1", "/usr/lib/libfabric.so.1.20.0", "1.17", "")
IBVERBS = Library("libibverbs.so.1", "/usr/lib/libibverbs.so.1.14.44.0", "1.14.44.0", "")
CUDA = Library("libcuda.so.1", "/usr/lib/libcuda.so.550.54.15", "12.4", "")
NOWHERE = "cannot open shared object file: No such file or directory"
LIBRARIES = LibraryFacts(
    (FABRIC, IBVERBS, CUDA), {"libibverbs.so.1": "RDMA devices", "libcuda.so.1": "an NVIDIA driver"}
)
V2 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a00:0005", "RoCE v2", "eth1")
V2_LINK_LOCAL = Gid(1, "fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2", "eth1")
V2_VLAN = Gid(2, "0000:0000:0000:0000:0000:ffff:0a00:0006", "RoCE v2", "eth1.7", vlan=True)
V1 = Gid(0, "0000:0000:0000:0000:0000:ffff:0a00:0005", "IB/RoCE v1", "eth1")
ROCE = RdmaPort("mlx5_0", 1, NicKind.ROCE, active=True, gids=(V1, V2_LINK_LOCAL, V2), mtu=9000)
RDMA = RdmaFacts((ROCE,))
PCIE = PcieFacts({"0000:16:00.0": False}, {"0000:18:00.0": True})
OPEN_DRIVER = "NVIDIA UNIX Open Kernel Module for x86_64  570.86.15"
CLOSED_DRIVER = "NVIDIA UNIX x86_64 Kernel Module  535.161.08"
NVGPUS = tuple(NvGpu(f"0000:{bus:02x}:00.0", 18, 18, switched=True) for bus in (0x1B, 0x43))
LINKS = NvLinks(NVGPUS, ((0, 18), (18, 0)))
ASKING = Asking(((True, True), (True, True)), dmabuf=True, descriptor="", legacy="", ordering=(100, 200))
GPU = GpuFacts(8, 8, driver=OPEN_DRIVER, kernel=(6, 8), peermem="", links=LINKS, asked=ASKING)
UNASKED = replace(GPU, asked=None)
GOOD_TRIAL = Trial("local", True, True, admission="secret", imm_arrived=True, seconds=0.001)
TRIALS = TrialFacts((GOOD_TRIAL, Trial("efa", True, False)))
LOCAL = ChosenRail(RailSpec("local"), "for the test")


def _library(library: Library, **changes: Any) -> LibraryFacts:
    changed = replace(library, **changes)
    return replace(LIBRARIES, libraries=tuple(changed if one is library else one for one in LIBRARIES.libraries))


def _auto(
    rails: tuple[ChosenRail, ...] = (LOCAL,), gpus: int = 0, left: tuple[str, str] | None = None
) -> AutomaticFacts:
    choice = RailChoice(rails, () if left is None else (RailLeftOut(*left),))
    return AutomaticFacts(tuple(AutomaticChoice(gpu, choice) for gpu in range(-1, gpus)))


def _asked(**changes: Any) -> GpuFacts:
    return replace(GPU, asked=replace(ASKING, **changes))


def _trial(name: str, **changes: Any) -> TrialFacts:
    return TrialFacts((GOOD_TRIAL, replace(Trial(name, True, True, imm_arrived=True), **changes)))


@dataclass(frozen=True)
class Case:
    """With these facts, and these providers asked for, this check finds this."""

    group: str
    facts: Any
    check: str
    verdict: str
    asked: frozenset[str] = frozenset()
    states: str = ""


def _case(group: str, facts: Any, check: str, verdict: str, states: str = "", *asked: str) -> Case:
    return Case(group, facts, check, verdict, frozenset(asked), states)


CASES = [
    _case("kernel", KERNEL, "kernel", "ok", "6.8.0"),
    _case("kernel", KernelFacts("5.4", {"MADV_POPULATE_WRITE": "Invalid argument"}), "kernel", "warn", "POPULATE"),
    _case("kernel", KernelFacts("4.18", {"pidfd_open": "Function not implemented"}), "kernel", "fail", "pidfd_open"),
    _case("cores", CORES, "cores for polling", "ok", "192 of 192"),
    _case("cores", replace(CORES, online=2, allowed=2), "cores for polling", "warn"),
    _case("cores", replace(CORES, quota=8.0), "cores for polling", "warn", "quota 8"),
    _case("cores", replace(CORES, quota=0.5), "cores for polling", "fail", "quota 0.5"),
    _case("cores", CORES, "CPU affinity", "ok"),
    _case("cores", replace(CORES, far_nics=("mlx5_0",)), "CPU affinity", "warn", "mlx5_0"),
    _case("cores", CORES, "clock source", "ok", "tsc"),
    _case("cores", replace(CORES, clock="hpet"), "clock source", "warn", "hpet"),
    _case("cores", replace(CORES, clock=None), "clock source", "warn", "unknown"),
    _case("limits", LIMITS, "memlock limit", "ok", "unlimited"),
    _case("limits", replace(LIMITS, locked_bytes=64 << 10), "memlock limit", "fail", "64 KiB"),
    _case("limits", replace(LIMITS, locked_bytes=64 << 10, may_lock=True), "memlock limit", "ok", "CAP_IPC_LOCK"),
    _case("limits", replace(LIMITS, locked_bytes=64 << 10, nics=False), "memlock limit", "n.a."),
    _case("limits", replace(LIMITS, locked_bytes=64 << 10, nics=False), "memlock limit", "fail", "", "verbs"),
    _case("limits", LIMITS, "file descriptors", "ok", "65536"),
    _case("limits", replace(LIMITS, files=1024), "file descriptors", "ok", "raised up to 16384"),
    _case("limits", replace(LIMITS, files=1024, most_files=2048), "file descriptors", "warn", "hard limit is 2048"),
    _case("limits", LIMITS, "threads", "ok", "no bound"),
    _case("limits", replace(LIMITS, tasks_left=100), "threads", "ok", "100 more"),
    _case("limits", replace(LIMITS, tasks_left=20), "threads", "warn", "20 more"),
    _case("limits", replace(LIMITS, tasks_left=0), "threads", "fail", "0 more"),
    _case("limits", replace(LIMITS, files=128, most_files=128), "file descriptors", "fail", "128"),
    _case("memory", MEMORY, "huge pages", "ok"),
    _case("memory", replace(MEMORY, collapse_error="Invalid argument"), "huge pages", "warn", "Invalid argument"),
    _case("memory", replace(MEMORY, thp=None, collapse_error="x"), "huge pages", "warn", "not in this kernel"),
    _case("ptrace", PTRACE, "ptrace policy", "ok", "ptrace_scope 1"),
    _case("ptrace", PtraceFacts(2, "Operation not permitted"), "ptrace policy", "warn", "Operation not permitted"),
    _case("libraries", LIBRARIES, "libfabric", "ok", "libfabric.so.1.20.0"),
    _case("libraries", _library(FABRIC, file="", error=NOWHERE), "libfabric", "n.a.", NOWHERE),
    _case("libraries", _library(FABRIC, file="", error=NOWHERE), "libfabric", "fail", "tcp needs it", "tcp"),
    _case("libraries", _library(FABRIC, version="1.9"), "libfabric", "fail", "1.9"),
    _case("libraries", _library(FABRIC, others=("/opt/efa/libfabric.so.1",)), "libfabric", "warn", "/opt/efa"),
    _case("libraries", LIBRARIES, "libibverbs", "ok"),
    _case("libraries", _library(IBVERBS, file="", error=NOWHERE), "libibverbs", "fail", "RDMA devices"),
    _case("libraries", replace(_library(IBVERBS, file="", error=NOWHERE), devices={}), "libibverbs", "n.a."),
    _case("libraries", LIBRARIES, "libcuda", "ok", "12.4"),
    _case("libraries", _library(CUDA, error="cuInit failed with CUDA error 999"), "libcuda", "fail", "999"),
    _case("libraries", replace(_library(CUDA, error="cuInit failed"), devices={}), "libcuda", "warn", "cuInit"),
    _case("rdma", RDMA, "RDMA devices", "ok", "mlx5_0 (roce)"),
    _case("rdma", RdmaFacts(()), "RDMA devices", "n.a."),
    _case("rdma", RdmaFacts(()), "RDMA devices", "fail", "verbs needs it", "verbs"),
    _case("rdma", RdmaFacts((), ("0000:18:00.0",)), "RDMA devices", "warn", "0000:18:00.0"),
    _case("rdma", RdmaFacts((), ("0000:18:00.0",)), "RDMA devices", "fail", "0000:18:00.0", "verbs"),
    _case("rdma", RdmaFacts((replace(ROCE, kind=NicKind.IWARP),)), "RDMA devices", "fail", "iwarp", "verbs"),
    _case("rdma", RDMA, "RDMA devices", "fail", "roce", "efa"),
    _case("rdma", RDMA, "RDMA ports", "ok", "1 of 1"),
    _case("rdma", RdmaFacts((ROCE, replace(ROCE, number=2, active=False))), "RDMA ports", "warn", "mlx5_0:2"),
    _case("rdma", RdmaFacts((replace(ROCE, active=False),)), "RDMA ports", "fail", "all 1"),
    _case("rdma", RDMA, "RoCE GIDs", "ok", "mlx5_0:1 index 3 (10.0.0.5 on eth1)"),
    _case(
        "rdma",
        RdmaFacts((replace(ROCE, gids=(V2_VLAN, V2)),)),
        "RoCE GIDs",
        "ok",
        "index 3 (10.0.0.5 on eth1), before index 2 (10.0.0.6 on eth1.7, a VLAN)",
    ),
    _case("rdma", RdmaFacts((replace(ROCE, gids=(replace(V2, up=False),)),)), "RoCE GIDs", "warn", "down behind"),
    _case("rdma", RdmaFacts((replace(ROCE, gids=(V1,)),)), "RoCE GIDs", "warn", "no RoCE v2"),
    _case("rdma", RdmaFacts((replace(ROCE, gids=()),)), "RoCE GIDs", "fail", "no address at all"),
    _case("rdma", RdmaFacts((replace(ROCE, gids=(V1, V2_LINK_LOCAL)),)), "RoCE GIDs", "warn", "no IPv4"),
    _case("rdma", RDMA, "RoCE MTU", "ok", "9000"),
    _case("rdma", RdmaFacts((replace(ROCE, mtu=1500),)), "RoCE MTU", "warn", "mlx5_0:1 (1500)"),
    _case("pcie", PCIE, "PCIe ACS", "ok"),
    _case("pcie", replace(PCIE, redirects={"0000:16:00.0": True}), "PCIe ACS", "warn", "0000:16:00.0"),
    _case("pcie", replace(PCIE, redirects={"0000:16:00.0": None}), "PCIe ACS", "warn", "cannot read 1 of 1"),
    _case("pcie", replace(PCIE, redirects={}), "PCIe ACS", "n.a."),
    _case("pcie", PCIE, "relaxed ordering", "ok"),
    _case("pcie", replace(PCIE, relaxed={"0000:18:00.0": False}), "relaxed ordering", "warn", "0000:18:00.0"),
    _case("pcie", replace(PCIE, relaxed={"0000:18:00.0": None}), "relaxed ordering", "warn", "cannot read"),
    _case("pcie", replace(PCIE, relaxed={}), "relaxed ordering", "n.a."),
    _case("gpu", GPU, "GPUs", "ok", "570.86.15"),
    _case("gpu", replace(GPU, driver=None), "GPUs", "fail", "not loaded"),
    _case("gpu", replace(GPU, gpus=0), "GPUs", "n.a."),
    _case("gpu", replace(GPU, gpus=0), "GPUs", "fail", "cuda needs it", "cuda"),
    _case("gpu", GPU, "GPU peer access", "ok", "each of 2"),
    _case("gpu", _asked(reach=((True, False), (True, True))), "GPU peer access", "warn", "cuda:0 to cuda:1"),
    _case("gpu", _asked(reach=((True,),)), "GPU peer access", "n.a.", "1 GPU(s)"),
    _case("gpu", UNASKED, "GPU peer access", "n.a."),
    _case("gpu", GPU, "NVLink", "ok", "18 links up on each GPU, to switches"),
    _case(
        "gpu",
        replace(GPU, links=NvLinks((NVGPUS[0], replace(NVGPUS[1], up=17)), LINKS.between)),
        "NVLink",
        "warn",
        "GPU 1 (17 of 18)",
    ),
    _case("gpu", replace(GPU, links=NvLinks(NVGPUS, ((0, 0), (0, 0)))), "NVLink", "warn", "to no other"),
    _case("gpu", replace(GPU, links=NvLinks((), ())), "NVLink", "n.a."),
    _case("gpu", GPU, "GPU work queues", "ok", "8 for each"),
    _case("gpu", replace(GPU, connections=32), "GPU work queues", "ok", "32 for each"),
    _case("gpu", replace(GPU, connections=1), "GPU work queues", "warn", "CUDA_DEVICE_MAX_CONNECTIONS=1"),
    _case("gpu", GPU, "GPU memory sharing", "ok", "descriptor"),
    _case("gpu", _asked(descriptor="cuMemImport: refused"), "GPU memory sharing", "fail", "cuMemImport: refused"),
    _case("gpu", _asked(legacy="cuIpcOpen: refused"), "GPU memory sharing", "warn", "cuIpcOpen: refused"),
    _case("gpu", _asked(error="cuInit: X"), "GPU memory sharing", "fail", "cuInit: X"),
    _case("gpu", UNASKED, "GPU memory sharing", "n.a."),
    _case("gpu", replace(GPU, driver=CLOSED_DRIVER), "GPU memory to NICs", "ok", "the driver exports it"),
    _case("gpu", UNASKED, "GPU memory to NICs", "ok", "open kernel modules"),
    _case(
        "gpu", replace(UNASKED, driver=CLOSED_DRIVER, peermem="nvidia_peermem"), "GPU memory to NICs", "ok", "peermem"
    ),
    _case("gpu", replace(UNASKED, driver=CLOSED_DRIVER), "GPU memory to NICs", "warn", "neither"),
    _case("gpu", replace(GPU, kernel=(5, 4)), "GPU memory to NICs", "warn", "neither"),
    _case("gpu", replace(GPU, rdma_nics=0), "GPU memory to NICs", "n.a."),
    _case("gpu", GPU, "NIC writes to GPUs", "ok", "100, 200"),
    _case("gpu", _asked(ordering=(100, 0)), "NIC writes to GPUs", "warn", "cuda:1 (0)"),
    _case("gpu", UNASKED, "NIC writes to GPUs", "n.a."),
    _case("automatic", _auto(), "auto", "ok", "local, for the test"),
    _case("automatic", _auto(rails=()), "auto", "fail", "no rail"),
    _case("automatic", _auto(gpus=1), "auto with GPU 0", "ok", "local, for the test"),
    _case("automatic", _auto(rails=(), gpus=1), "auto with GPU 0", "fail", "no rail"),
    _case("automatic", _auto(left=("tcp", "not named")), "auto leaves out", "ok", "tcp: not named"),
    _case("automatic", _auto(left=("verbs", NOT_BUILT)), "auto leaves out", "ok", "verbs: not in this build"),
    _case("automatic", _auto(left=("verbs:mlx5_0", NOT_BUILT)), "auto leaves out", "warn", "not in this build"),
    _case("link keys", LinkKeyFacts("k", there=False), "link keys", "n.a.", "no key file"),
    _case("link keys", LinkKeyFacts("k", named=True, there=False), "link keys", "fail", "cluster.keys names k"),
    _case("link keys", LinkKeyFacts("k", error="k has mode 0644"), "link keys", "fail", "mode 0644"),
    _case(
        "link keys",
        LinkKeyFacts("k", trusted=5, unbound=("ab" * 32,) * 4),
        "link keys",
        "warn",
        "4 of 5 keys without a role, nodes with them may register as any: abababab..., abababab..., "
        "abababab... and 1 more",
    ),
    _case("link keys", LinkKeyFacts("k", trusted=2), "link keys", "ok", "2 trusted, each bound"),
    _case("link keys", LinkKeyFacts("k", named=True, trusted=2), "fabrics of nodes", "ok", "secret: peers prove"),
    _case("link keys", LinkKeyFacts("k", trusted=2), "fabrics of nodes", "warn", "open: no cluster.keys"),
    _case("link keys", LinkKeyFacts("k", there=False), "fabrics of nodes", "warn", "open: no cluster.keys"),
    _case("link keys", LinkKeyFacts("k", named=True, error="mode"), "fabrics of nodes", "warn", "open: no"),
    _case("trials", TRIALS, "usable", "ok", "local"),
    _case("trials", TrialFacts((replace(GOOD_TRIAL, error="refused"),)), "usable", "fail", "no rail works"),
    _case("trials", TrialFacts((Trial("local", False, True),)), "usable", "fail"),
    _case("trials", TRIALS, "rail local", "ok", "secret; a first write with an immediate arrived in 1.0 ms"),
    _case("trials", TrialFacts((replace(GOOD_TRIAL, imm_arrived=False),)), "rail local", "fail", "never arrived"),
    _case("trials", TRIALS, "rail efa", "n.a.", "nothing here"),
    _case("trials", TRIALS, "rail efa", "fail", "nothing here", "efa"),
    _case("trials", _trial("tcp", error="no answer within 30 s"), "rail tcp", "fail", "no answer"),
    _case("trials", _trial("tcp", error="libfabric could not be opened (x)"), "rail tcp", "n.a.", "be opened"),
    _case("trials", _trial("tcp", error="libfabric could not be opened (x)"), "rail tcp", "fail", "opened", "tcp"),
    _case("trials", _trial("tcp", error="died by SIGSEGV"), "rail tcp", "fail", "SIGSEGV"),
    _case("trials", _trial("verbs", error="refused"), "rail verbs", "fail", "refused"),
    _case("trials", _trial("verbs", chosen="mlx5_3", error="refused"), "rail verbs:mlx5_3", "fail", "refused"),
    _case("trials", _trial("verbs", error="rxe0 could not be opened"), "rail verbs", "fail", "rxe0"),
    _case("trials", _trial("cuda", built=False), "rail cuda", "n.a.", "not in this build"),
    _case("trials", _trial("cuda", built=False), "rail cuda", "fail", "not in this build", "cuda"),
]

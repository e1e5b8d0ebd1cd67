"""GPUs: the driver, who reaches whose memory, NVLinks, sharing between processes, and what NICs reach of it.

What the driver itself must be asked is asked in a child (gpu_trial.py): it starts CUDA, and may crash or hang alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncfabric.observe.nvlink import NvLinks, read_nvlinks
from asyncfabric.observe.topology import NicKind, read_topology
from asyncfabric_services.doctor.child import ask_child
from asyncfabric_services.doctor.finding import Asked, Finding, Verdict, absent
from asyncfabric_services.doctor.proc_text import read_text

PEERMEM = ("nvidia_peermem", "nv_peer_mem")
DMABUF_KERNEL = (5, 12)
ORDERED_FOR_OWNER = 100
PROGRAM = "asyncfabric_services.doctor.gpu_trial"
NO_LINKS = NvLinks((), ())
HERE = Path("/")

CONNECTIONS, USUAL_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 8
"""CUDA's variable, and what holds where it is not set."""


@dataclass(frozen=True)
class Asking:
    """What libcuda reported. `reach[i][j]`: cuda:i reaches the memory of cuda:j.

    `ordering[i]`: for whom writes of NICs to cuda:i are in order, in CUDA's numbers: 0 none, 100 its kernels, 200 all.
    `descriptor`, `legacy`: why a handle of that kind could not be opened in another process, "" when it could. `error`:
    why nothing was learned, or not all.
    """

    reach: tuple[tuple[bool, ...], ...]
    dmabuf: bool
    descriptor: str
    legacy: str
    error: str = ""
    ordering: tuple[int, ...] = ()


@dataclass(frozen=True)
class GpuFacts:
    """`driver`: the line of /proc/driver/nvidia/version, None without it. `peermem`: the loaded module, or "".

    `asked`: None where the driver could not be asked, as of a copied tree. `connections`: queues of a process for
    work on a GPU, None where nothing is set.
    """

    gpus: int
    rdma_nics: int
    driver: str | None
    kernel: tuple[int, ...]
    peermem: str
    links: NvLinks = NO_LINKS
    asked: Asking | None = None
    connections: int | None = None


def read_gpu(root: Path) -> GpuFacts:
    """Read what sysfs and the driver report."""
    topology = read_topology(root)
    release = read_text(root, "proc/sys/kernel/osrelease") or ""
    version = (read_text(root, "proc/driver/nvidia/version") or "").splitlines()
    driven = bool(topology.gpus and version)
    return GpuFacts(
        gpus=len(topology.gpus),
        rdma_nics=sum(1 for nic in topology.nics if nic.kind is not NicKind.ETHERNET),
        driver=version[0].removeprefix("NVRM version:").strip() if version else None,
        kernel=tuple(int(part) for part in re.findall(r"\d+", release)[:2]),
        peermem=next((name for name in PEERMEM if (root / "sys/module" / name).exists()), ""),
        links=read_nvlinks(root) if driven else NO_LINKS,
        asked=asking_of(ask_child(PROGRAM)) if driven and root == HERE else None,
        connections=int(stated) if (stated := os.environ.get(CONNECTIONS, "")).isdecimal() else None,
    )


def asking_of(stated: Mapping[str, Any]) -> Asking:
    """Return the view of the child's answer."""
    sharing = stated.get("sharing", {})
    gpus = stated.get("gpus", [])
    return Asking(
        reach=tuple(tuple(row) for row in stated.get("reach", [])),
        dmabuf=bool(gpus) and all(gpu["dmabuf"] for gpu in gpus),
        descriptor=sharing.get("descriptor", ""),
        legacy=sharing.get("legacy", ""),
        ordering=tuple(gpu.get("ordering", 0) for gpu in gpus),
        error=stated.get("error", "") if sharing else stated.get("error", "no GPU is visible to CUDA"),
    )


def check_gpu(facts: GpuFacts, asked: Asked) -> list[Finding]:
    """State what GPUs are here, how they reach each other, and whether NICs reach their memory."""
    findings = [_driver(facts, asked)]
    if facts.gpus and facts.driver is not None:
        findings += [_peers(facts), _links(facts), _sharing(facts), _queues(facts)]
    return [*findings, _direct(facts), _ordering(facts)]


def _driver(facts: GpuFacts, asked: Asked) -> Finding:
    if facts.gpus == 0:
        return absent("GPUs", "none", "a GPU, or other rails: host memory needs none", asked, "cuda")
    if facts.driver is None:
        fix = "install the NVIDIA driver and load it: modprobe nvidia"
        return Finding("GPUs", Verdict.FAIL, f"{facts.gpus}, but their driver is not loaded", fix)
    return Finding("GPUs", Verdict.OK, f"{facts.gpus}, {facts.driver}")


def _peers(facts: GpuFacts) -> Finding:
    name = "GPU peer access"
    reach = facts.asked.reach if facts.asked is not None else ()
    if len(reach) < 2:
        return Finding(name, Verdict.ABSENT, f"CUDA shows {len(reach)} GPU(s) here", "nothing to do with less than two")
    cut = [f"cuda:{i} to cuda:{j}" for i, row in enumerate(reach) for j, yes in enumerate(row) if not yes]
    if not cut:
        return Finding(name, Verdict.OK, f"each of {len(reach)} GPUs reaches the memory of the others")
    fix = (
        "see nvidia-smi topo -p2p w: a fabric manager that does not run, an IOMMU or PCIe ACS between them, or GPUs "
        "that cannot; copies between these are refused"
    )
    return Finding(name, Verdict.WARN, "no access from " + ", ".join(cut), fix)


def _links(facts: GpuFacts) -> Finding:
    gpus = facts.links.gpus
    if not any(gpu.links for gpu in gpus):
        return Finding("NVLink", Verdict.ABSENT, "none", "nothing to do: copies between GPUs take PCIe")
    weak = [f"GPU {i} ({gpu.up} of {gpu.links})" for i, gpu in enumerate(gpus) if gpu.up < gpu.links]
    if weak:
        fix = "see nvidia-smi nvlink -s and the log of nvidia-fabricmanager; bandwidth shrinks with the links"
        return Finding("NVLink", Verdict.WARN, "links are down: " + ", ".join(weak), fix)
    row = gpus[0]
    alone = len(gpus) > 1 and not all(any(counts) for counts in facts.links.between)
    detail = f"{row.up} links up on each GPU" + (", to switches" if row.switched else "")
    if alone:
        fix = "start nvidia-fabricmanager, which programs the switches"
        return Finding("NVLink", Verdict.WARN, f"{detail}, but they lead from some GPU to no other", fix)
    return Finding("NVLink", Verdict.OK, detail)


def _sharing(facts: GpuFacts) -> Finding:
    name = "GPU memory sharing"
    stated = facts.asked
    if stated is None:
        return Finding(name, Verdict.ABSENT, "the driver of a copied tree cannot be asked", "run doctor on the machine")
    if stated.error:
        fix = "see the line of libcuda; in a container, run it with the NVIDIA runtime"
        return Finding(name, Verdict.FAIL, f"the driver could not be asked: {stated.error}", fix)
    if stated.descriptor:
        fix = "this system refuses memory handles as file descriptors: a driver for CUDA 12, and no sandbox around it"
        return Finding(name, Verdict.FAIL, f"not between processes: {stated.descriptor}", fix)
    if stated.legacy:
        fix = (
            "fabric.allocate() works; to register memory of a framework too, let the processes share an IPC namespace "
            "(docker --ipc=host)"
        )
        return Finding(name, Verdict.WARN, f"descriptors work, legacy handles do not: {stated.legacy}", fix)
    return Finding(name, Verdict.OK, "another process opened memory by descriptor and by legacy handle")


def _queues(facts: GpuFacts) -> Finding:
    name, count = "GPU work queues", facts.connections
    if count is None or count >= USUAL_CONNECTIONS:
        return Finding(name, Verdict.OK, f"{USUAL_CONNECTIONS if count is None else count} for each process and GPU")
    fix = (
        f"unset it, or {USUAL_CONNECTIONS} to 32: streams that share a queue wait for each other, so a copy may stand "
        "behind work that waits for the word which that copy brings"
    )
    return Finding(name, Verdict.WARN, f"{CONNECTIONS}={count}, which some frameworks set", fix)


def _direct(facts: GpuFacts) -> Finding:
    name = "GPU memory to NICs"
    if facts.gpus == 0 or facts.rdma_nics == 0:
        return Finding(name, Verdict.ABSENT, "not both a GPU and an RDMA NIC", "nothing to do on such a machine")
    if facts.asked is not None and facts.asked.dmabuf and facts.kernel >= DMABUF_KERNEL:
        return Finding(name, Verdict.OK, "DMA-BUF: the driver exports it, and the kernel is 5.12 or newer")
    if facts.driver is not None and "Open Kernel Module" in facts.driver and facts.kernel >= DMABUF_KERNEL:
        return Finding(name, Verdict.OK, "DMA-BUF: open kernel modules, and a kernel of 5.12 or newer")
    if facts.peermem:
        return Finding(name, Verdict.OK, f"the module {facts.peermem} is loaded")
    fix = "modprobe nvidia-peermem, or use the driver's open kernel modules on Linux 5.12 or newer, which bring DMA-BUF"
    return Finding(name, Verdict.WARN, "neither DMA-BUF nor nvidia-peermem", fix)


def _ordering(facts: GpuFacts) -> Finding:
    name = "NIC writes to GPUs"
    if facts.gpus == 0 or facts.rdma_nics == 0:
        return Finding(name, Verdict.ABSENT, "not both a GPU and an RDMA NIC", "nothing to do on such a machine")
    if facts.asked is None or not facts.asked.ordering:
        return Finding(
            name, Verdict.ABSENT, "the driver was not asked", "run doctor on the machine, with its GPUs visible"
        )
    loose = [f"cuda:{i} ({order})" for i, order in enumerate(facts.asked.ordering) if order < ORDERED_FOR_OWNER]
    if not loose:
        return Finding(name, Verdict.OK, f"GPUs order them: {', '.join(map(str, facts.asked.ordering))}")
    fix = (
        "nothing to do: a counter flushes them before it releases a stream or a kernel, which takes a read over the bus"
    )
    return Finding(name, Verdict.WARN, "in no order on " + ", ".join(loose), fix)

"""GPUs: may NICs reach their memory, by DMA-BUF or by nvidia-peermem?

Next in this room, or in rooms beside it: driver, peer access, NVLink, IPC. A GPU check is a function of GpuFacts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from asyncfabric.observe.topology import NicKind, read_topology
from asyncfabric_services.doctor.finding import Asked, Finding, Verdict, absent
from asyncfabric_services.doctor.proc_text import read_text

PEERMEM = ("nvidia_peermem", "nv_peer_mem")
DMABUF_KERNEL = (5, 12)


@dataclass(frozen=True)
class GpuFacts:
    """`driver`: the line of /proc/driver/nvidia/version, None without it. `peermem`: the loaded module, or ""."""

    gpus: int
    rdma_nics: int
    driver: str | None
    kernel: tuple[int, ...]
    peermem: str


def read_gpu(root: Path) -> GpuFacts:
    """Read what sysfs and the driver say."""
    topology = read_topology(root)
    release = read_text(root, "proc/sys/kernel/osrelease") or ""
    version = (read_text(root, "proc/driver/nvidia/version") or "").splitlines()
    return GpuFacts(
        gpus=len(topology.gpus),
        rdma_nics=sum(1 for nic in topology.nics if nic.kind is not NicKind.ETHERNET),
        driver=version[0].removeprefix("NVRM version:").strip() if version else None,
        kernel=tuple(int(part) for part in re.findall(r"\d+", release)[:2]),
        peermem=next((name for name in PEERMEM if (root / "sys/module" / name).exists()), ""),
    )


def check_gpu(facts: GpuFacts, asked: Asked) -> list[Finding]:
    """Say what GPUs are here, and whether NICs reach their memory."""
    return [_driver(facts, asked), _direct(facts)]


def _driver(facts: GpuFacts, asked: Asked) -> Finding:
    if facts.gpus == 0:
        return absent("GPUs", "none", "a GPU, or other rails: host memory needs none", asked, "cuda")
    if facts.driver is None:
        fix = "install the NVIDIA driver and load it: modprobe nvidia"
        return Finding("GPUs", Verdict.FAIL, f"{facts.gpus}, but their driver is not loaded", fix)
    return Finding("GPUs", Verdict.OK, f"{facts.gpus}, {facts.driver}")


def _direct(facts: GpuFacts) -> Finding:
    name = "GPU memory to NICs"
    if facts.gpus == 0 or facts.rdma_nics == 0:
        return Finding(name, Verdict.ABSENT, "not both a GPU and an RDMA NIC", "nothing to do on such a machine")
    if facts.driver is not None and "Open Kernel Module" in facts.driver and facts.kernel >= DMABUF_KERNEL:
        return Finding(name, Verdict.OK, "DMA-BUF: open kernel modules, and a kernel of 5.12 or newer")
    if facts.peermem:
        return Finding(name, Verdict.OK, f"the module {facts.peermem} is loaded")
    fix = "modprobe nvidia-peermem, or use the driver's open kernel modules on Linux 5.12 or newer, which bring DMA-BUF"
    return Finding(name, Verdict.WARN, "neither DMA-BUF nor nvidia-peermem", fix)

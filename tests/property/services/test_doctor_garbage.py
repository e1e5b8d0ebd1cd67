"""The doctor's rooms on garbage: whatever the files of a machine hold, a room returns findings and never raises."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_tree import MachineTree
from machines import flat_vm

from asyncfabric_services.doctor.child import answer_of
from asyncfabric_services.doctor.groups import GROUPS
from asyncfabric_services.doctor.library_trial import cached_files, mapped_file
from asyncfabric_services.doctor.pcie import redirects_peers, relaxed_ordering

pytest.importorskip("asyncfabric._native._engine", reason="THE DOCTOR WAS NOT TESTED ON GARBAGE: `make build`")

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
ROOMS = [
    group for group in GROUPS if group.name in ("cores", "limits", "memory", "rdma", "pcie", "gpu")
]  # those of files
PROVIDERS = st.sets(st.sampled_from(("local", "verbs", "efa", "cuda"))).map(frozenset)
ODD = (
    "",
    "-1",
    "0x",
    "9" * 40,
    "\x00",
    "[",
    "]",
    "4:cpu:/",
    "0::/../..",
    "max",
    "0 0",
    "RoCE v2",
    "0000:0000:0000:0000:0000:ffff:zz",
)


def tree_of(root: Path) -> MachineTree:
    """Build a machine with all the files that rooms read."""
    tree = flat_vm(root)
    for path in list((root / "sys/bus/pci/devices").iterdir()):
        tree.write(f"sys/bus/pci/devices/{path.name}/config", bytes(256))
    for name in (
        "proc/sys/kernel/osrelease",
        "proc/driver/nvidia/version",
        "proc/self/cgroup",
        "sys/fs/cgroup/cpu.max",
        "sys/devices/system/clocksource/clocksource0/current_clocksource",
        "sys/kernel/mm/transparent_hugepage/enabled",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled",
    ):
        tree.write(name, "1 2 3")
    return tree


@pytest.mark.slow
@settings(max_examples=60)
@given(st.dictionaries(st.integers(0, 300), st.sampled_from(ODD) | st.text(max_size=40), max_size=40), PROVIDERS)
def test_rooms_answer_on_garbage(garbage: dict[int, str], asked: frozenset[str]) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        root = tree_of(Path(folder)).root
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        for number, text in garbage.items():
            files[number % len(files)].write_text(text, errors="surrogateescape")
        for group in ROOMS:
            findings = group.check(group.read(root), asked)
            assert findings, group.name
            assert all(finding.fix or finding.verdict == "ok" for finding in findings)


@given(st.binary(max_size=300) | st.binary(min_size=4096, max_size=4096), st.integers(0, 255))
def test_configuration_spaces_of_any_bytes(space: bytes, start: int) -> None:
    assert relaxed_ordering(space) in (True, False, None)
    assert redirects_peers(space) in (True, False, None)
    linked = bytearray(space.ljust(4096, bytes([start])))
    linked[0x06], linked[0x34] = 0x10, start
    assert relaxed_ordering(bytes(linked)) in (True, False, None)


@given(st.integers(-64, 255), st.text(), st.text())
def test_answers_and_listings_of_any_text(status: int, out: str, err: str) -> None:
    assert answer_of(status, out, err)
    assert isinstance(mapped_file("libfabric.so.1", out), str)
    assert isinstance(cached_files("libfabric.so.1", "/usr/lib/libfabric.so.1", out), list)

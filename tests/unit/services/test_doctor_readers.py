"""The readers of `asyncfabric doctor` on trees with planted troubles, and what they make of children that misbehave."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from machine_tree import DOWN, MachineTree, Port
from machines import MELLANOX, ROCE_GIDS, dgx_h100, flat_vm, p5en_48xlarge

from asyncfabric.control import make_keys
from asyncfabric.control.keys import add_trusted, trust_file, write_keys
from asyncfabric.observe.topology import read_topology
from asyncfabric_services.doctor.child import answer_of, ask_child
from asyncfabric_services.doctor.cores import read_cores
from asyncfabric_services.doctor.gpu import asking_of, read_gpu
from asyncfabric_services.doctor.library_trial import cached_files, look, mapped_file, version_in
from asyncfabric_services.doctor.limits import read_limits
from asyncfabric_services.doctor.link_keys import read_link_keys
from asyncfabric_services.doctor.memory import read_memory
from asyncfabric_services.doctor.pcie import read_pcie, redirects_peers, relaxed_ordering
from asyncfabric_services.doctor.proc_text import has_capability
from asyncfabric_services.doctor.ptrace import read_ptrace
from asyncfabric_services.doctor.rdma import read_rdma
from asyncfabric_services.doctor.trials import planned, present

pytest.importorskip("asyncfabric._native._engine", reason="THE DOCTOR'S READERS WERE NOT TESTED: `make build`")


def config_space(*, relaxed: bool = False, acs_control: int | None = None, length: int = 4096) -> bytes:
    """Return a configuration space with a PCI Express capability behind a power one, and perhaps ACS behind AER."""
    space = bytearray(4096)
    space[0x06] = 0x10
    space[0x34] = 0x40
    space[0x40:0x42] = bytes((0x01, 0x60))
    space[0x60:0x62] = bytes((0x10, 0x00))
    struct.pack_into("<H", space, 0x68, 0x2810 if relaxed else 0x2800)
    struct.pack_into("<I", space, 0x100, 0x0001 | 2 << 16 | 0x148 << 20)
    if acs_control is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x7F, acs_control)
    return bytes(space[:length])


def test_the_key_file_of_the_settings_is_looked_at_and_else_the_user_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_keys(tmp_path / "etc/node.key", *make_keys(), frozenset(["decode"]))
    add_trusted(trust_file(tmp_path / "etc/node.key"), "ab" * 32)
    monkeypatch.setenv("ASYNCFABRIC_CLUSTER__KEYS", "/etc/node.key")
    facts = read_link_keys(tmp_path)
    assert (facts.file, facts.named, facts.trusted, facts.unbound) == ("/etc/node.key", True, 2, ("ab" * 32,))
    assert facts.admission == "secret"
    (tmp_path / "etc/node.key").chmod(0o644)
    assert "others on this machine can read it" in read_link_keys(tmp_path).error
    monkeypatch.setenv("ASYNCFABRIC_CLUSTER__KEY", "x")
    assert "ASYNCFABRIC_CLUSTER__KEY" in read_link_keys(tmp_path).error
    monkeypatch.delenv("ASYNCFABRIC_CLUSTER__KEY")
    monkeypatch.delenv("ASYNCFABRIC_CLUSTER__KEYS")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/me/c")
    facts = read_link_keys(tmp_path)
    assert (facts.file, facts.named, facts.there) == ("/home/me/c/asyncfabric/link.key", False, False)
    assert facts.admission == "open"


@pytest.mark.parametrize(("relaxed", "length", "states"), [(True, 4096, True), (False, 256, False), (True, 64, None)])
def test_relaxed_ordering_is_a_bit_of_device_control(relaxed: bool, length: int, states: bool | None) -> None:
    assert relaxed_ordering(config_space(relaxed=relaxed, length=length)) is states


@pytest.mark.parametrize(
    ("control", "length", "states"),
    [
        (0, 4096, False),
        (0x1D, 4096, True),
        (0x11, 4096, False),
        (0x04, 4096, True),
        (None, 4096, False),
        (0x1D, 256, None),
    ],
)
def test_acs_redirects_by_its_control_word(control: int | None, length: int, states: bool | None) -> None:
    assert redirects_peers(config_space(acs_control=control, length=length)) is states


def test_broken_capability_lists_end() -> None:
    looping = bytearray(config_space())
    looping[0x41] = 0x40
    assert relaxed_ordering(bytes(looping)) is None
    struct.pack_into("<I", looping, 0x100, 0x0001 | 0x100 << 20)
    assert redirects_peers(bytes(looping)) is False
    assert relaxed_ordering(b"\xff" * 4096) is None  # what an unplugged device answers
    assert redirects_peers(b"\xff" * 4096) is False


def test_the_bridges_between_gpu_and_nic_are_looked_at(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    for path in (tree.root / "sys/bus/pci/devices").iterdir():
        (path.resolve() / "config").write_bytes(config_space(relaxed=True, acs_control=0))
    facts = read_pcie(tree.root)
    assert {"0000:16:00.0", "0000:17:00.0", "0000:17:01.0", "0000:19:00.0", "0000:1a:00.0"} <= set(facts.redirects)
    assert "0000:15:01.0" not in facts.redirects, "above the switch: no traffic between the two goes there"
    assert set(facts.redirects.values()) == {False}
    assert facts.relaxed["0000:18:00.0"] is True
    tree.write("sys/bus/pci/devices/0000:17:01.0/config", config_space(acs_control=0x1D))
    tree.write("sys/bus/pci/devices/0000:18:00.0/config", config_space()[:64])
    facts = read_pcie(tree.root)
    assert facts.redirects["0000:17:01.0"] is True
    assert facts.relaxed["0000:18:00.0"] is None


def test_ports_gids_and_mtu_are_read(tmp_path: Path) -> None:
    tree = flat_vm(tmp_path)
    facts = read_rdma(tree.root)
    assert [port.name for port in facts.ports] == ["mlx5_0:1", "mlx5_1:1"]
    assert [gid.kind for gid in facts.ports[0].gids] == ["IB/RoCE v1", "RoCE v2"] * 2
    assert facts.ports[0].mtu == 1500
    assert facts.adapters == ()
    tree.write("sys/class/infiniband/mlx5_0/ports/1/state", DOWN)
    tree.write("sys/class/infiniband/mlx5_0/ports/1/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000")
    facts = read_rdma(tree.root)
    assert not facts.ports[0].active
    assert len(facts.ports[0].gids) == len(ROCE_GIDS) - 1
    behind = facts.ports[0].gids[-1].netdev
    tree.write(f"sys/class/net/{behind}/operstate", "down")
    tree.write(f"sys/class/net/{behind}/uevent", f"DEVTYPE=vlan\nINTERFACE={behind}")
    last = read_rdma(tree.root).ports[0].gids[-1]
    assert (last.up, last.vlan) == (False, True)
    tree.write("sys/class/infiniband/mlx5_0/ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:zz")
    assert len(read_rdma(tree.root).ports[0].gids) == len(ROCE_GIDS) - 2


def test_an_adapter_without_its_driver_is_seen(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    tree.pci("pci0000:00/0000:00:05.0", MELLANOX, 0x1021, 0x020700)
    tree.pci("pci0000:00/0000:00:06.0", 0x1D0F, 0xEFA2, 0x020000)
    tree.pci("pci0000:00/0000:00:07.0", 0x1D0F, 0xEC20, 0x020000)
    assert read_rdma(tree.root).adapters == ("0000:00:05.0", "0000:00:06.0")


@pytest.mark.parametrize(
    ("group", "limits", "quota"),
    [
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/../../x", {"cpu.max": "50000 100000"}, 0.5),
        (
            "4:cpu,cpuacct:/docker/1",
            {"cpu/docker/1/cpu.cfs_quota_us": "200000", "cpu/docker/1/cpu.cfs_period_us": "100000"},
            2.0,
        ),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1"}, None),
        ("", {}, None),
    ],
)
def test_quotas_of_control_groups(group: str, limits: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    tree.write("proc/self/cgroup", group)
    for name, text in limits.items():
        tree.write(f"sys/fs/cgroup/{name}", text)
    assert read_cores(tree.root).quota == quota


def test_nics_out_of_reach_of_the_cpuset(tmp_path: Path) -> None:
    tree = p5en_48xlarge(tmp_path)
    assert read_cores(tree.root).far_nics == ()
    tree.allow("48-95")
    facts = read_cores(tree.root)
    assert (facts.allowed, facts.online) == (48, 192)
    assert len(facts.far_nics) == 8


def test_gpu_driver_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    tree = dgx_h100(tmp_path)
    tree.write("proc/sys/kernel/osrelease", "5.15.0-1045-nvidia")
    assert read_gpu(tree.root).driver is None
    tree.write(
        "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module  570.1\nGCC version:  gcc 12"
    )
    tree.write("sys/module/nvidia_peermem/refcnt", "0")
    facts = read_gpu(tree.root)
    assert (facts.gpus, facts.rdma_nics, facts.kernel, facts.peermem) == (8, 12, (5, 15), "nvidia_peermem")
    assert facts.driver == "NVIDIA UNIX Open Kernel Module  570.1"
    assert facts.asked is None and facts.links.gpus == () and facts.connections is None
    link = {"up": True, "to": "switch"}
    tree.write("nvlinks.json", json.dumps([{"address": "0000:1b:00.0", "links": [link, link], "peers": []}]))
    assert [(gpu.links, gpu.up) for gpu in read_gpu(tree.root).links.gpus] == [(2, 2)]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert read_gpu(tree.root).connections == 1


def test_what_the_driver_was_asked() -> None:
    gpu = {"rdma": True, "dmabuf": True, "vmm": True, "descriptors": True}
    shared = {"descriptor": "", "legacy": "cuIpcOpenMemHandle: CUDA_ERROR_X"}
    asking = asking_of({"gpus": [gpu, gpu], "reach": [[True, False], [False, True]], "sharing": shared})
    assert (asking.reach, asking.dmabuf) == (((True, False), (False, True)), True)
    assert (asking.descriptor, asking.legacy, asking.error) == ("", "cuIpcOpenMemHandle: CUDA_ERROR_X", "")
    assert not asking_of({"gpus": [gpu, gpu | {"dmabuf": False}], "reach": [], "sharing": shared}).dmabuf
    assert asking_of({"error": "its process died by SIGSEGV"}).error == "its process died by SIGSEGV"
    assert asking_of({"gpus": [], "reach": []}).error
    assert asking_of({"gpus": [gpu], "reach": [[True]], "error": "cuMemCreate: no"}).error == "cuMemCreate: no"


def test_the_child_that_asks_states_why_it_cannot() -> None:
    if os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has a driver: tests/gpu sees the child at work")
    assert "libcuda" in ask_child("asyncfabric_services.doctor.gpu_trial")["error"]


def test_what_a_machine_could_use(tmp_path: Path) -> None:
    assert present(read_topology(p5en_48xlarge(tmp_path / "p5en").root)) == {"local", "tcp", "efa", "cuda"}
    assert present(read_topology(flat_vm(tmp_path / "vm").root)) == {"local", "tcp", "verbs", "cuda"}
    tree = MachineTree(tmp_path / "down")
    card = tree.pci("pci0000:00/0000:00:05.0", MELLANOX, 0x1021, 0x020700)
    tree.rdma("mlx5_0", card, Port(state=DOWN))
    assert present(read_topology(tree.root)) == {"local", "tcp"}


def test_each_active_device_of_verbs_is_tried(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    trials = planned(read_topology(tree.root), frozenset({"local", "verbs"}), ("local", "verbs", "efa"))
    assert [trial.chosen for trial in trials if trial.provider == "verbs"] == [
        f"mlx5_{number}" for number in range(12) if number != 8
    ], "mlx5_8 is down"
    assert [trial.tried for trial in trials if trial.provider != "verbs"] == [True, False]
    none = planned(read_topology(tmp_path / "none"), frozenset({"verbs"}), ("verbs",))
    assert [(trial.provider, trial.tried) for trial in none] == [("verbs", False)]


def test_capabilities_and_missing_files(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path)
    tree.write("proc/self/status", "CapEff:\t0000000000004000")
    assert has_capability(tmp_path, 14)
    assert not has_capability(tmp_path, 19)
    assert read_limits(tmp_path).may_lock
    assert not read_limits(tmp_path).nics
    facts = read_memory(tmp_path)
    assert (facts.thp, facts.thp_shmem) == (None, None)


def test_a_child_really_writes_here() -> None:
    assert read_ptrace(Path("/")).error == ""


def test_a_child_that_cannot_write_states_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncfabric_services.doctor.ptrace.TRIAL", "json.tool")  # it reads the line and complains
    assert "Extra data" in read_ptrace(Path("/")).error


@pytest.mark.parametrize(
    ("status", "out", "err", "answer"),
    [
        (0, 'noise\n{"file": "x"}\n', "", {"file": "x"}),
        (-11, "", "", {"error": "its process died by SIGSEGV"}),
        (-32, "", "", {"error": "its process died by signal 32"}),
        (1, "", "Traceback\nValueError: no\n", {"error": "ValueError: no"}),
        (0, "[1]\n", "", {"error": "no answer, status 0"}),
    ],
)
def test_answers_of_children(status: int, out: str, err: str, answer: dict[str, str]) -> None:
    assert answer_of(status, out, err) == answer


def test_a_child_that_hangs_is_ended() -> None:
    assert ask_child("http.server", "0", "--bind", "127.0.0.1", deadline_s=0.2) == {"error": "no answer within 0.2 s"}


def test_the_file_that_was_really_loaded() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 1  /usr/lib/libfabricated.so.1\n"
        "7f02-7f03 r-xp 00000000 08:01 2  /opt/amazon/efa/lib/libfabric.so.1.27.0\n"
    )
    assert mapped_file("libfabric.so.1", maps) == "/opt/amazon/efa/lib/libfabric.so.1.27.0"
    assert mapped_file("libibverbs.so.1", maps) == ""
    assert version_in("/usr/lib/libibverbs.so.1.14.44.0") == "1.14.44.0"
    assert "cannot open" in look("libfabric.so.77")["error"]


def test_other_copies_of_a_library_are_named() -> None:
    cache = (
        "\tlibfabric.so.1 (libc6,x86-64) => /opt/efa/libfabric.so.1\n"
        "\tlibfabric.so.1 (libc6,x86-64) => /usr/lib/libfabric.so.1\n"
        "\tlibfabric.so.1 (libc6) => /usr/lib32/libfabric.so.1\n"
        "\tlibfabric.so.12 (libc6,x86-64) => /usr/lib/libfabric.so.12\n"
    )
    assert cached_files("libfabric.so.1", "/opt/efa/libfabric.so.1", cache) == ["/usr/lib/libfabric.so.1"]


@pytest.mark.parametrize(
    ("group", "files", "left"),
    [
        ("0::/", {"sys/fs/cgroup/pids.max": "100", "sys/fs/cgroup/pids.current": "60"}, 40),
        ("0::/a/b", {"sys/fs/cgroup/a/pids.max": "10", "sys/fs/cgroup/a/pids.current": "12"}, 0),
        ("0::/", {"sys/fs/cgroup/pids.max": "max", "sys/fs/cgroup/pids.current": "60"}, None),
        ("8:pids:/x\n4:memory:/", {"sys/fs/cgroup/pids/pids.max": "64", "sys/fs/cgroup/pids/pids.current": "4"}, 60),
        ("0::/a\0b/c", {"sys/fs/cgroup/pids.max": "100", "sys/fs/cgroup/pids.current": "60"}, 40),
        ("4:memory:/", {"sys/fs/cgroup/memory/pids.max": "5", "sys/fs/cgroup/pids.max": "5"}, None),
    ],
)
def test_bounds_of_processes(group: str, files: dict[str, str], left: int | None, tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert read_limits(tmp_path).tasks_left == left

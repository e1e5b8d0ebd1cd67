"""What `rails="auto"` chooses: on trees of known machines, on planted ones, and by its rules on any."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_tree import MachineTree
from machines import dgx_h100, flat_vm, laptop, p5en_48xlarge

from asyncfabric._bridge.choice import MOST_NICS, GpuInUse, RailChoice, choose_rails
from asyncfabric._bridge.gpu_in_use import find_in_use
from asyncfabric._bridge.machine import NativeNic, NativeTopology, NicKind
from asyncfabric._gpu import Driver

BUILT = frozenset({"local", "cuda", "tcp", "verbs", "efa", "ofi-verbs"})
NETWORKED = ("verbs", "efa")


def read(tree: MachineTree) -> NativeTopology:
    native = pytest.importorskip("asyncfabric._bridge.native", reason="NO TREE WAS READ: `make build`")
    topology: NativeTopology = native.read_native_topology(str(tree.root))
    return topology


def texts(choice: RailChoice) -> list[str]:
    return [rail.text for rail in choice.rails]


def why(choice: RailChoice, rail: str) -> str:
    (reason,) = [left.reason for left in choice.left_out if left.rail == rail]
    return reason


def test_a_machine_without_nics_and_gpus_gets_its_memory_alone(tmp_path: Path) -> None:
    for topology in (None, read(laptop(tmp_path))):
        choice = choose_rails(topology, None, BUILT)
        assert texts(choice) == ["local"]
        assert {left.rail for left in choice.left_out} == {"cuda", "verbs", "efa", "tcp"}
        assert "rails=('auto', 'tcp:" in why(choice, "tcp")
        assert "('auto', 'cuda:0')" in why(choice, "cuda")
    assert "wlp0s20f3" in why(choice, "tcp")  # the interface that is up, and not the one that is down
    assert "enp45s0" not in why(choice, "tcp")


@pytest.mark.parametrize(
    ("machine", "gpu", "rails"),
    [
        (p5en_48xlarge, GpuInUse(5, "0000:93:00.0"), ["cuda:5", "local", "efa:rdmap148s0", "efa:rdmap149s0"]),
        (dgx_h100, GpuInUse(0, "0000:9D:00.0"), ["cuda:0", "local", "verbs:mlx5_6"]),
        (flat_vm, GpuInUse(0, "0000:00:07.0"), ["cuda:0", "local", "verbs:mlx5_1"]),
        (laptop, GpuInUse(0, "0000:01:00.0"), ["cuda:0", "local"]),
    ],
)
def test_a_process_with_a_gpu_gets_it_and_its_nics(
    tmp_path: Path, machine: Callable[[Path], MachineTree], gpu: GpuInUse, rails: list[str]
) -> None:
    choice = choose_rails(read(machine(tmp_path)), gpu, BUILT)
    assert texts(choice) == rails
    assert all(rail.reason for rail in choice.rails)
    if "verbs:mlx5_6" in rails:
        assert "same switch" in choice.rails[-1].reason
        assert why(choice, "verbs:mlx5_0") == "it serves another GPU than the one that this process uses"
        assert "another kind" in why(choice, "verbs:mlx5_1")  # storage
        assert why(choice, "verbs:mlx5_8") == "no port of it is active"


def test_a_process_without_a_gpu_gets_the_nics_of_its_numa_node(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    tree.allow("60-70")
    choice = choose_rails(read(tree), None, BUILT)
    assert texts(choice) == ["local", "verbs:mlx5_6", "verbs:mlx5_9", "verbs:mlx5_10", "verbs:mlx5_11"]
    assert "NUMA nodes of this process (1)" in choice.rails[1].reason
    assert why(choice, "verbs:mlx5_0") == "it is on another NUMA node than the CPUs of this process"


def test_no_more_nics_are_opened_than_a_fabric_can_use(tmp_path: Path) -> None:
    choice = choose_rails(read(p5en_48xlarge(tmp_path)), None, BUILT)
    assert len(choice.rails) == 1 + MOST_NICS
    assert sum("are opened unnamed" in left.reason for left in choice.left_out) == 16 - MOST_NICS


def test_what_is_named_is_not_chosen_as_well(tmp_path: Path) -> None:
    choice = choose_rails(read(flat_vm(tmp_path)), None, BUILT, named={"verbs", "tcp"})
    assert texts(choice) == ["local"]
    assert not {"tcp", "verbs:mlx5_0"} & {left.rail for left in choice.left_out}


def test_what_is_not_permitted_or_not_built_is_left_out_with_that_reason(tmp_path: Path) -> None:
    topology = read(flat_vm(tmp_path))
    choice = choose_rails(topology, None, BUILT, require={"verbs"})
    assert texts(choice) == ["verbs:mlx5_0", "verbs:mlx5_1"]
    assert why(choice, "local") == "config.require does not permit it"
    choice = choose_rails(topology, None, {"local"})
    assert texts(choice) == ["local"]
    assert why(choice, "verbs:mlx5_0") == why(choice, "tcp") == "not in this build"


@st.composite
def machines(draw: st.DrawFn) -> NativeTopology:
    """Draw a machine as the native reader would describe one: pools of one kind, shares of GPUs."""
    gpus = draw(st.integers(0, 4))
    nics: list[NativeNic] = [
        {
            "name": f"nic{number}",
            "kind": int(draw(st.sampled_from(NicKind))),
            "place": {"address": f"0000:{number:02x}:00.0", "path": [], "numa_node": draw(st.integers(-1, 1))},
            "netdevs": [f"eth{number}"],
            "gbits_per_s": 100.0,
            "up": draw(st.booleans()),
            "software": draw(st.booleans()),
            "virtual_function": False,
        }
        for number in range(draw(st.integers(0, 12)))
    ]
    kind = draw(st.sampled_from(NicKind))
    pool = [number for number, nic in enumerate(nics) if nic["up"] and nic["kind"] == kind]
    owners = max(gpus, 1)
    allowed = draw(st.sets(st.integers(0, 3), min_size=1))
    return {
        "nodes": [
            {"id": node, "cpus": [2 * node, 2 * node + 1], "distances": [10, 21], "memory_bytes": 0, "nics": []}
            for node in range(2)
        ],
        "allowed_cpus": sorted(allowed),
        "gpus": [
            {
                "place": {"address": f"0000:f{number}:00.0", "path": [], "numa_node": 0},
                "device_id": 1,
                "driver": "",
                "model": "",
            }
            for number in range(gpus)
        ],
        "nics": nics,
        "groups": [
            {
                "gpu": owner if gpus else -1,
                "nics": pool[owner::owners],
                "numa_node": 0,
                "cpus": [],
                "cpus_are_near": True,
                "worker_cpu": -1,
            }
            for owner in range(owners)
        ],
        "spare_nics": [],
        "notes": [],
        "distances": [[3] * len(nics) for _ in range(gpus)],
    }


@given(
    machines(),
    st.one_of(st.none(), st.builds(GpuInUse, st.integers(0, 3), st.sampled_from(["0000:F0:00.0", "0000:f3:00.0", ""]))),
    st.sets(st.sampled_from(sorted(BUILT))),
    st.sets(st.sampled_from(["tcp", "verbs", "local"])),
    st.sets(st.sampled_from(["local", "verbs", "efa"])),
)
def test_each_rail_and_each_provider_has_its_reason(
    topology: NativeTopology, gpu: GpuInUse | None, built: set[str], named: set[str], require: set[str]
) -> None:
    choice = choose_rails(topology, gpu, built, named, require)
    chosen = [rail.spec.provider for rail in choice.rails]
    assert all(rail.reason for rail in choice.rails)
    assert all(left.reason for left in choice.left_out)
    assert not set(chosen) & named
    assert set(chosen) <= built
    assert "tcp" not in chosen, "a port was opened on a network that nobody named"
    assert not require or set(chosen) <= require
    assert ("cuda" in chosen) <= (gpu is not None)
    names = [rail.text for rail in choice.rails] + [left.rail for left in choice.left_out]
    assert len(names) == len(set(names)), "something was both taken and left, or twice"
    # Each provider and each RDMA device is accounted for.
    for provider in {"local", "cuda", "tcp", "verbs", "efa"} - named:
        assert any(name.partition(":")[0] == provider for name in names)
    for nic in topology["nics"]:
        kind = NicKind(nic["kind"])
        provider = "efa" if kind == NicKind.EFA else "verbs"
        if kind != NicKind.ETHERNET and provider not in named:
            assert f"{provider}:{nic['name']}" in names
    opened = {rail.spec.device for rail in choice.rails if rail.spec.provider in NETWORKED}
    by_name = {nic["name"]: nic for nic in topology["nics"]}
    assert len(opened) <= MOST_NICS
    assert all(by_name[name]["up"] for name in opened)
    assert len({by_name[name]["kind"] for name in opened}) <= 1, "NICs that cannot reach each other"


class CudaLibrary:
    """A libcuda of `contexts` devices, some with a primary context."""

    def __init__(self, active: list[bool], *, current: int | None = None, initialised: bool = True) -> None:
        self.active, self.current, self.initialised = active, current, initialised
        self.made = 0

    def _answer(self, **values: tuple[Any, Any]) -> int:
        if not self.initialised:
            return 3
        for pointer, value in values.values():
            pointer._obj.value = value
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:  # noqa: N802
        return 1  # as for a code that the driver does not know

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802, named as the driver names it
        return self._answer(count=(count, len(self.active)))

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        return self._answer(context=(context, None if self.current is None else 0xC0))

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        return self._answer(device=(device, self.current))

    def cuDevicePrimaryCtxGetState(self, device: ctypes.c_int, flags: Any, active: Any) -> int:  # noqa: N802
        return self._answer(flags=(flags, 0), active=(active, int(self.active[device.value])))

    def cuDeviceGetPCIBusId(self, text: Any, length: int, device: ctypes.c_int) -> int:  # noqa: N802
        text.value = f"0000:{0xAB + device.value:02X}:00.0".encode()
        return 0


@pytest.mark.parametrize(
    ("library", "found"),
    [
        (CudaLibrary([True], initialised=False), None),
        (CudaLibrary([]), None),
        (CudaLibrary([False, False]), None),
        (CudaLibrary([False, True, True]), GpuInUse(1, "0000:ac:00.0")),
        (CudaLibrary([True, False, True], current=2), GpuInUse(2, "0000:ad:00.0")),
    ],
)
def test_the_gpu_in_use_is_that_of_a_context_which_is_there(library: CudaLibrary, found: GpuInUse | None) -> None:
    assert find_in_use(Driver(library)) == found

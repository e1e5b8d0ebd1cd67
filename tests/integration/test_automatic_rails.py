"""The default, `rails="auto"`: what a process gets and does not get, and what it takes to leave the host."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from availability import need
from hosts import CARD, open_hosts
from machine_tree import MachineTree
from machines import flat_vm
from processes import party

import asyncfabric as af
from asyncfabric._bridge.engine import Engine
from asyncfabric._bridge.native import open_native_engine

LOOK = """
import json, os, trio
import asyncfabric as af

def own_listeners():
    own = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}").readlines()[1:]]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]

async def main():
    async with af.open_fabric() as fabric:
        maps = open("/proc/self/maps").read()
        print(json.dumps({
            "rails": [(rail.provider, rail.reason) for rail in fabric.rails],
            "left": {left.rail: left.reason for left in fabric.rails_left_out},
            "libraries": [name for name in ("libfabric", "libibverbs", "libcuda") if name in maps],
            "listening": own_listeners(),
        }))

trio.run(main)
"""


def test_a_process_opens_no_port_and_loads_no_library_that_it_does_not_use() -> None:
    need("local")
    if Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        pytest.skip("AN RDMA DEVICE IS HERE: its library is loaded, and rightly")
    done = subprocess.run([sys.executable, "-P", "-c", LOOK], capture_output=True, text=True, check=True, timeout=60)
    seen = json.loads(done.stdout)
    assert seen["rails"] == [["local", "processes of this user on this host"]]
    assert seen["left"].keys() == {"cuda", "verbs", "efa", "tcp"}
    assert seen["libraries"] == []
    assert seen["listening"] == []


def planted(tmp_path: Path) -> functools.partial[Engine]:
    """Return what opens engines of a machine whose RDMA devices are in its files only."""
    return functools.partial(open_native_engine, root=str(flat_vm(tmp_path).root))


def test_a_device_that_does_not_open_is_left_out_and_the_fabric_works(tmp_path: Path) -> None:
    need("local")

    async def fixture() -> None:
        engines = planted(tmp_path)
        async with (
            af.open_fabric(engine_factory=engines) as target,
            af.open_fabric() as source,
        ):
            assert [rail.provider for rail in target.rails] == ["local"]
            reasons = {left.rail: left.reason for left in target.rails_left_out}
            assert "verbs" in reasons["verbs:mlx5_0"]
            assert reasons.keys() >= {"verbs:mlx5_0", "verbs:mlx5_1", "tcp", "cuda"}
            counter = target.counter()
            await source.connect(target.address)
            inbox, outbox = await target.allocate(4096), await source.allocate(4096)
            await source.write(outbox, inbox.key(access="write"), 0, imm=counter.imm)
            await counter.wait(1)
            assert target.regions()[0].refused == ""

    trio.run(fixture)


def test_what_is_named_beside_auto_has_to_open(tmp_path: Path) -> None:
    need("local")

    async def fixture() -> None:
        config = af.FabricConfig(rails=("auto", "verbs:mlx5_0"))
        async with af.open_fabric(config, engine_factory=planted(tmp_path)):
            raise AssertionError("a named rail was left out")

    with pytest.raises(af.DeviceError, match="verbs"):
        trio.run(fixture)


def test_where_nothing_that_is_permitted_opens_the_error_lists_the_reasons(tmp_path: Path) -> None:
    need("local")

    async def fixture() -> None:
        async with af.open_fabric(af.FabricConfig(require=("efa",)), engine_factory=planted(tmp_path)):
            raise AssertionError("a rail was opened that config.require does not permit")

    with pytest.raises(af.DeviceError, match=r"local: config.require does not permit it.*tcp: "):
        trio.run(fixture)
    with pytest.raises(af.DeviceError, match=r"verbs:mlx5_0: .*verbs:mlx5_1: "):
        trio.run(functools.partial(_open_only, "verbs", tmp_path / "verbs"))


async def _open_only(provider: str, folder: Path) -> None:
    async with af.open_fabric(af.FabricConfig(require=(provider,)), engine_factory=planted(folder)):
        raise AssertionError(f"a {provider} rail was opened")


@pytest.mark.slow
def test_hosts_meet_over_the_network_that_both_name_and_processes_of_one_over_its_memory() -> None:
    need("local", "tcp")
    rails = ("auto", f"tcp:{CARD}")
    with (
        open_hosts(2) as (here, there),
        party(*rails, prefix=here.prefix) as one,
        party("auto", prefix=here.prefix) as beside,
        party(*rails, prefix=there.prefix) as far,
    ):
        near, away = beside.receive()["address"], far.receive()["address"]
        assert one.receive()["rails"] == ["local", "tcp"]
        assert one.ask("connect", address=near)["provider"] == "local"
        assert one.ask("connect", address=away)["provider"] == "tcp"
        refused = beside.fail("connect", address=away)
        assert refused["error"] == "PeerError"
        assert "rails=('auto', 'tcp:eth0')" in refused["text"], "nobody learns how to reach another host"


def test_a_tree_without_devices_is_a_machine_without_rdma(tmp_path: Path) -> None:
    engine = open_native_engine(af.FabricConfig(), root=str(MachineTree(tmp_path).root))
    try:
        assert {row["rail"] for row in engine.rails_left_out()} >= {"verbs", "efa"}
    finally:
        engine.close()

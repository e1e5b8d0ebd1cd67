"""Two directories of one table, from one file: launchers give nodes the addresses of both.

Directories and routers only, which load no model; the table is in a real etcd.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import etcd
import pytest
import slurm
import trio
from clusters import LOOK_S, PATIENCE_S, open_cluster, processes_of, until_strong

from asyncfabric_services.launch import cluster
from asyncfabric_services.launch.cluster import rows_of
from asyncfabric_services.launch.launcher import Launcher
from asyncfabric_services.launch.plan import DIRECTORY_VARIABLE
from asyncfabric_services.launch.record import load_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FILE = """\
name = "kills"
[settings]
directory.store = "{store}"
http.port = 0
log.level = "warning"
[nodes.directory]
count = 2
[nodes.router]
"""


@pytest.fixture
def server(short: Path) -> Iterator[etcd.Etcd]:
    made = etcd.Etcd(short)
    yield made
    made.kill()


def joined_by(folder: Path, node: str) -> set[str]:
    """Return the addresses of directories that the process of a node was given."""
    (process,) = processes_of(folder.resolve(), node)
    variables = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    (value,) = (one.partition("=")[2] for one in variables if one.startswith(f"{DIRECTORY_VARIABLE}="))
    return set(value.split(","))


@pytest.mark.parametrize("name", ["local", "slurm"])
def test_each_node_is_given_all_directories(name: str, short: Path, server: etcd.Etcd) -> None:
    if name == "slurm" and (lacking := slurm.missing()):
        pytest.skip(f"THE CLUSTER WAS NOT STARTED BY SLURM: {lacking}")
    file, folder = short / "cluster.toml", short / "cluster"
    file.write_text(FILE.format(store=server.address))

    async def main() -> None:
        async with open_cluster(name, file, folder) as launcher:
            links = await until_strong(launcher, 3)
            directories = {links["directory-0"], links["directory-1"]}
            assert len(directories) == 2
            assert set(load_record(folder).links.split(",")) == directories
            assert joined_by(folder, "router-0") == directories
            if name == "local":
                await lose_one(launcher, folder, links)

    trio.run(main)


async def lose_one(launcher: Launcher, folder: Path, links: dict[str, str]) -> None:
    """One directory is drained under a node that it holds: the node stays in at the other, and so do new ones."""
    record = await cluster.drain(launcher, load_record(folder), "directory-0")
    assert record.spec.nodes["directory"].count == 1
    assert record.links == links["directory-1"]
    grown = await cluster.scale(launcher, record, {"router": 2})
    with trio.fail_after(PATIENCE_S):
        while True:
            rows = {row["name"]: row["state"] for row in await rows_of(launcher)}
            if rows == {"directory-1": "ready", "router-0": "ready", "router-1": "ready"}:
                break
            await trio.sleep(LOOK_S)
    assert joined_by(folder, "router-1") == {links["directory-1"]}
    with pytest.raises(Exception, match="directory-1 is the only directory"):
        await cluster.drain(launcher, grown, "directory-1")

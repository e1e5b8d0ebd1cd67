"""A local cluster from other shells: status, scale, drain, down; nodes that die, for ever too; a supervisor that dies.

Directory and routers only, which load no model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from clusters import processes_of

from asyncfabric_services.cli import asyncfabric
from asyncfabric_services.launch.record import load_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FILE = """\
name = "small"
[settings.log]
level = "warning"
[nodes.directory]
[nodes.router]
count = {routers}
settings.http.port = 0
{more}
[launcher.local]
restarts = {restarts}
"""
PATIENCE = 200.0
BOTH = ("directory-0", "router-0")


class Shell:
    """Commands on one cluster."""

    def __init__(self, base: Path, restarts: int = 5, routers: int = 1, more: str = "") -> None:
        self.base = base
        self.folder = base / "state" / "asyncfabric" / "small"
        self.file = base / "cluster.toml"
        self.file.write_text(FILE.format(restarts=restarts, routers=routers, more=more))
        self.environment = {"XDG_STATE_HOME": str(base / "state")}

    def run(self, *arguments: str) -> Result:
        """Run a command in this process, which is another one than the cluster's."""
        return CliRunner().invoke(asyncfabric, arguments, env=self.environment)

    def up(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "asyncfabric_services", "up", str(self.file), *options]
        environment = {**os.environ, **self.environment}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)

    def rows(self) -> dict[str, dict[str, Any]]:
        done = self.run("status", "--json")
        assert done.exit_code == 0, done.output
        return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}

    def until(self, accepted: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE
        while not accepted(rows := self.rows()):
            assert time.monotonic() < deadline, rows
        return rows

    def kill(self, node: str) -> None:
        processes = processes_of(self.folder, node)
        assert processes, f"{node} has no process"
        for process in processes:
            os.kill(process, signal.SIGKILL)


@contextmanager
def detached(shell: Shell) -> Iterator[Shell]:
    """Have a cluster in the background; it is down at the end of the scope."""
    done = shell.up("--detach")
    try:
        assert done.returncode == 0, done.stderr
        assert "small answers at http://127.0.0.1:" in done.stdout
        yield shell
    finally:
        shell.run("down", "small")


def test_other_shells_look_scale_drain_and_end_it(short: Path) -> None:
    with detached(Shell(short)) as shell:
        assert {name: row["state"] for name, row in shell.rows().items()} == {
            "directory-0": "ready",
            "router-0": "ready",
        }
        again = shell.run("up", str(shell.file))
        assert again.exit_code == 2
        assert "small runs already" in again.stderr
        assert shell.run("scale", "router=2").stdout == "router: 2\n"
        assert load_record(shell.folder).spec.nodes["router"].count == 2
        rows = shell.until(lambda rows: rows.get("router-1", {}).get("state") == "ready")
        assert rows["router-1"]["http"] != rows["router-0"]["http"]
        wrong = shell.run("scale", "small", "routr=2")
        assert wrong.exit_code == 2
        assert "small has no group 'routr'; did you mean router?" in wrong.stderr
        assert "small has no node 'router-7'" in shell.run("drain", "router-7").stderr
        assert "directory-0 is the only directory" in shell.run("drain", "directory-0").stderr
        before = rows["router-1"]
        assert shell.run("drain", "router-0").stdout == "router-0 ended\n"
        assert load_record(shell.folder).spec.nodes["router"].count == 1
        assert shell.run("scale", "router=1").exit_code == 0  # so many run: nothing comes back for the one drained
        assert shell.rows().keys() == {"directory-0", "router-1"}
        assert shell.rows()["router-1"]["link"] == before["link"]
        assert shell.run("scale", "router=2").exit_code == 0
        assert shell.rows().keys() == {"directory-0", "router-0", "router-1"}
        assert shell.run("down").stdout == "small is down\n"
        assert not processes_of(shell.folder, "directory-0") | processes_of(shell.folder, "router-0")
        assert shell.run("status").exit_code == 3


def test_nodes_that_die_come_back_where_they_are_looked_for_and_not_for_ever(short: Path) -> None:
    with detached(Shell(short, restarts=1)) as shell:
        shell.kill("directory-0")
        rows = shell.until(lambda rows: all(row["state"] == "ready" for row in rows.values()))
        assert (rows["directory-0"]["restarts"], rows["router-0"]["restarts"]) == (1, 0)
        shell.kill("directory-0")
        rows = shell.until(lambda rows: rows["directory-0"]["state"] == "failed")
        assert rows["directory-0"]["reason"].startswith("was ended by signal 9, after 1 restarts within 60s")
        assert rows["router-0"]["state"] == "waiting"


def test_a_supervisor_that_is_killed_takes_its_nodes_along_and_leaves_nothing_in_the_way(short: Path) -> None:
    with detached(Shell(short)) as shell:
        nodes = processes_of(shell.folder, "directory-0") | processes_of(shell.folder, "router-0")
        for place in Path("/proc").glob("[0-9]*"):
            if b"\0--folder\0" + os.fsencode(shell.folder) in _arguments(place):
                os.kill(int(place.name), signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while any(b"serve" in _arguments(Path(f"/proc/{node}")) for node in nodes):
            assert time.monotonic() < deadline
        done = shell.run("status")
        assert done.exit_code == 3
        assert "the process that held small is gone" in done.stderr
        assert shell.up("--detach").returncode == 0


def test_a_node_that_cannot_start_ends_it_with_its_log(short: Path) -> None:
    shell = Shell(short, more='environment = { ASYNCFABRIC_LOG__LEVEL = "loud" }')
    done = shell.up()
    assert done.returncode == 1
    assert "node router-0 did not start" in done.stderr
    assert "log.level (environment ASYNCFABRIC_LOG__LEVEL): expected one of debug, info" in done.stderr
    assert not processes_of(shell.folder, "directory-0")
    assert shell.run("status").exit_code == 3


def test_ctrl_c_drains_and_ends_it(short: Path) -> None:
    shell = Shell(short)
    command = [sys.executable, "-P", "-m", "asyncfabric_services", "up", str(shell.file)]
    with subprocess.Popen(
        command, env={**os.environ, **shell.environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as held:
        assert held.stdout is not None and held.stderr is not None
        assert b"2 nodes ready" in held.stdout.readline()
        held.send_signal(signal.SIGINT)
        assert held.wait(PATIENCE) == 0
        assert held.stderr.read() == b"small: its nodes drain and end\n"
    assert not processes_of(shell.folder, "directory-0")
    assert not (shell.folder / "cluster.json").exists()


def _arguments(place: Path) -> bytes:
    try:
        return (place / "cmdline").read_bytes()
    except OSError:
        return b""

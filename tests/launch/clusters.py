"""One cluster's file for all launchers, how each starts it here, and the processes of its nodes. On trio.

`STARTERS` has a launcher's way to start the cluster of a file, with its record in a folder, and to end it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path

import slurm
import trio
from raylets import open_raylets

from asyncfabric_services.demo.cluster.load import LoadRequest
from asyncfabric_services.demo.cluster.one_process import OneProcess
from asyncfabric_services.exits import EnvironmentUnfit
from asyncfabric_services.launch.cluster import rows_of
from asyncfabric_services.launch.holding import attached
from asyncfabric_services.launch.launcher import Launcher, launcher_module
from asyncfabric_services.launch.local import free_port
from asyncfabric_services.launch.plan import plan_nodes
from asyncfabric_services.launch.record import load_record
from asyncfabric_services.launch.spec import read_spec
from asyncfabric_services.runner.model import ModelChoice

MODEL = "kills"
SHAPE = {"layers": 2, "hidden": 64, "query_heads": 4, "kv_heads": 2}
# Nodes of two kinds of resources: under Slurm a heterogeneous job.
FILE = """\
name = "kills"
[settings]
model = {{ name = "{model}", layers = 2, hidden = 64, query_heads = 4, kv_heads = 2 }}
cache.memory = "16MiB"
cluster.patience = "300s"
router.deadline = "600s"
log.level = "warning"
[nodes.directory]
[nodes.router]
settings.http.port = {port}
[nodes.prefill]
count = 2
[nodes.decode]
count = 2
resources = {{ cpus = 2 }}
[launcher.local]
restarts = 100
"""
ASKS = [
    LoadRequest("The weights of the model are seeded, so each launcher's answer is known." * n, 12) for n in (1, 3, 7)
]
NODES = 6
LOOK_S = 0.1
PATIENCE_S = 240.0


def write_file(folder: Path) -> tuple[Path, str]:
    """Write the file of the cluster; return it and the HTTP address of its router."""
    file, port = folder / "cluster.toml", free_port()
    file.write_text(FILE.format(model=MODEL, port=port))
    return file, f"http://127.0.0.1:{port}"


def right_answers() -> dict[LoadRequest, str]:
    """Return what one process answers; blocking."""
    one = OneProcess(ModelChoice(path=None, seed=0, **SHAPE), 16, 2048)
    return {ask: one.answer(ask) for ask in ASKS}


def processes_of(folder: Path, node: str) -> set[int]:
    """Return the processes that serve as a node of the cluster whose keys or record are in a folder."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (place / "cmdline").read_bytes().split(b"\0")
            serves = node.encode() in arguments and b"--node-name" in arguments
            if serves and os.fsencode(folder) in (place / "environ").read_bytes():
                found.add(int(place.name))
        except OSError:
            continue  # it ended
    return found


async def until_strong(launcher: Launcher, nodes: int) -> dict[str, str]:
    """Wait until so many nodes are ready; return their link addresses by name."""
    with trio.fail_after(PATIENCE_S):
        while True:
            rows = await rows_of(launcher)
            if len(rows) == nodes and all(row["state"] == "ready" for row in rows):
                return {row["name"]: row["link"] for row in rows}
            await trio.sleep(LOOK_S)


def _up(file: Path, *options: str) -> list[str]:
    return [sys.executable, "-P", "-m", "asyncfabric_services", "up", str(file), *options]


async def _output(command: list[str], environment: Mapping[str, str], folder: Path) -> str:
    done = await trio.run_process(command, env=environment, cwd=folder, capture_stdout=True)
    return done.stdout.decode().strip()


@asynccontextmanager
async def _local(file: Path, folder: Path) -> AsyncIterator[None]:
    command = _up(file, "--launcher", "local", "--folder", str(folder))
    process = await trio.lowlevel.open_process(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await process.wait()


@asynccontextmanager
async def _slurm(file: Path, folder: Path) -> AsyncIterator[None]:
    base, environment = file.parent, dict(os.environ)
    with ExitStack() as stack:
        if "SLURM_CONF" not in environment:
            environment = stack.enter_context(slurm.open_slurm(base / "slurm"))
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        script = trio.Path(base / "job.sh")
        await script.write_text(await _output(_up(file, "--print", "slurm"), environment, base))
        job = await _output(["sbatch", "--parsable", f"--output={base}/job.log", str(script)], environment, base)
        await trio.Path(folder).symlink_to(base / f"kills-{job}")
        try:
            yield
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(60):
                await _output(["scancel", "--full", job], environment, base)
                while True:
                    if not await _output(["squeue", "-h"], environment, base):
                        break
                    await trio.sleep(LOOK_S)


@asynccontextmanager
async def _torchrun(file: Path, folder: Path) -> AsyncIterator[None]:
    ranks = len(plan_nodes(read_spec(file)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=99"]
    command = [sys.executable, "-P", *torchrun, "-m", *_up(file, "--folder", str(folder))[3:]]
    process = await trio.lowlevel.open_process(command, cwd=file.parent, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        with trio.CancelScope(shield=True):
            await process.wait()


@asynccontextmanager
async def _ray(file: Path, folder: Path) -> AsyncIterator[None]:
    with open_raylets(folder) as address:
        command = _up(file, "--launcher", "ray", "--folder", str(folder))
        environment = {**os.environ, "RAY_ADDRESS": address}
        process = await trio.lowlevel.open_process(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            with trio.CancelScope(shield=True):
                await process.wait()


STARTERS: dict[str, Callable[[Path, Path], AbstractAsyncContextManager[None]]] = {
    "local": _local,
    "ray": _ray,
    "slurm": _slurm,
    "torchrun": _torchrun,
}


@asynccontextmanager
async def open_cluster(name: str, file: Path, folder: Path) -> AsyncIterator[Launcher]:
    """Start the cluster of a file by a launcher, wait for its record in a folder, and attach to it.

    Cancellation: the cluster is ended.
    """
    async with STARTERS[name](file, folder):
        with trio.fail_after(PATIENCE_S):
            while True:
                try:
                    await attached(folder, rows_of)
                    break
                except EnvironmentUnfit:
                    await trio.sleep(LOOK_S)
        record = load_record(folder)
        async with launcher_module(name).attach_launcher(record, folder) as launcher:
            yield launcher

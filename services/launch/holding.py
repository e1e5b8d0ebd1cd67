"""How a command holds a cluster, or reaches one that another process holds, and what it prints meanwhile.

Each function here is the work of one command: it runs the event loop, or a process in the background.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import click
import trio

from asyncfabric.errors import ActorError, BrokenError
from asyncfabric_services.exits import FINE, CheckFailed, EnvironmentUnfit
from asyncfabric_services.interruption import failing_as, run_interruptible
from asyncfabric_services.launch import cluster
from asyncfabric_services.launch.launcher import Launcher, launcher_module
from asyncfabric_services.launch.plan import plan_nodes
from asyncfabric_services.launch.record import ClusterRecord, load_record, make_folder, remove_record, save_record
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.look.asking import run
from asyncfabric_services.settings.keys import SettingsError

LOOK_SECONDS = 0.3
LOG = "up.log"
LOG_TAIL = 3000  # characters
_T = TypeVar("_T")


def translated(asking: Callable[[], Awaitable[_T]]) -> _T:
    """Run on an event loop; what a cluster raises becomes an error of the command."""
    with failing_as(
        (SettingsError, lambda error: click.UsageError(str(error))),
        ((BrokenError, ActorError), lambda error: CheckFailed(str(error))),
        (click.ClickException, lambda error: error),
    ):
        return run(asking)


async def attached(folder: Path, asking: Callable[[Launcher], Awaitable[_T]]) -> _T:
    """Return what `asking(launcher)` returns for the cluster that runs from a folder.

    Cancellation: as that of `asking`.
    """
    record = load_record(folder)
    async with launcher_module(record.launcher).attach_launcher(record, folder) as launcher:
        return await asking(launcher)


def refuse_running(folder: Path) -> None:
    """Raise a usage error when a cluster runs from a folder; the record of one that is gone is removed."""
    try:
        name = load_record(folder).spec.name
        translated(partial(attached, folder, lambda launcher: launcher.nodes()))
    except EnvironmentUnfit:
        remove_record(folder)
        return
    raise click.UsageError(f"{name} runs already from {folder}: asyncfabric status {name}, or down")


async def hold(name: str, spec: ClusterSpec, folder: Path, detach: bool) -> int:
    """Bring a cluster up, print a line when it answers, and hold it until a signal or `down`; return the exit status.

    Cancellation: the cluster is taken down.
    """
    make_folder(folder)
    async with launcher_module(name).open_launcher(spec, folder) as launcher:
        kept = False
        try:
            _, caught = await run_interruptible(partial(_run, name, spec, folder, launcher, detach))
            kept = detach and caught is None
        finally:
            if not kept:
                click.echo(f"{spec.name}: its nodes drain and end", err=True)
                await launcher.aclose()
                remove_record(folder)
    return FINE


async def _run(name: str, spec: ClusterSpec, folder: Path, launcher: Launcher, detach: bool) -> None:
    began = trio.current_time()
    directories = await cluster.bring_up(launcher, spec)
    save_record(folder, ClusterRecord(name, spec, directories, dict(launcher.facts)))
    plans = plan_nodes(spec)
    rows = await cluster.wait_ready(launcher, [plan.name for plan in plans])
    routers = [row["http"] for row in rows if row["role"] == "router"]
    where = f"answers at {', '.join(f'{url}/v1' for url in routers)}" if routers else "runs"
    seconds = trio.current_time() - began
    click.echo(
        f"{spec.name} {where}: {len(plans)} nodes ready in {seconds:.1f} s; asyncfabric down {spec.name} ends it"
    )
    while True:
        if detach or not _present(folder):
            return
        await trio.sleep(LOOK_SECONDS)


def _present(folder: Path) -> bool:
    """Return whether the cluster was not taken down by another shell, which removes its record."""
    try:
        load_record(folder)
    except EnvironmentUnfit:
        return False
    return True


def leave(file: Path, launcher: str, folder: Path) -> int:
    """Have a process in the background hold the cluster; return the exit status when it answers.

    Raises CheckFailed when that process ended instead; the text has the end of its log.
    """
    make_folder(folder)
    program = "from asyncfabric_services.cli import main; main()"
    arguments = ("up", str(file.absolute()), "--launcher", launcher, "--folder", str(folder))
    with (folder / LOG).open("w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout as lines:
            line = lines.readline().decode()
        if not line:
            process.wait()
            log.seek(0)
            raise CheckFailed(f"the cluster did not come up: {log.read().decode(errors='replace')[-LOG_TAIL:].strip()}")
    click.echo(line, nl=False)
    return FINE

"""`asyncfabric up`, `status`, `scale`, `drain` and `down`: options in, lines out. What they do is in `cluster`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from asyncfabric_services.exits import FINE, EnvironmentUnfit
from asyncfabric_services.health.logs import open_log
from asyncfabric_services.launch import cluster
from asyncfabric_services.launch.example import EXAMPLE
from asyncfabric_services.launch.holding import attached, hold, leave, refuse_running, translated
from asyncfabric_services.launch.launcher import LAUNCHERS, PRINTERS, RANKS, launcher_module
from asyncfabric_services.launch.ranks import become, scheduler_around
from asyncfabric_services.launch.record import folder_of, load_record, remove_record, running_folders, save_record
from asyncfabric_services.launch.spec import read_spec
from asyncfabric_services.look.tables import Column, console, number, table_of
from asyncfabric_services.settings.keys import SettingsError, nearest

ROWS: tuple[Column, ...] = (
    ("node", lambda row: row["name"]),
    ("role", lambda row: row["role"]),
    ("state", lambda row: row["state"]),
    ("http", lambda row: row["http"]),
    ("restarts", lambda row: number(row["restarts"])),
    ("because", lambda row: row["reason"]),
)
_folder = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the cluster's record, keys and logs (default: one of its name in the state folder of the user).",
)
_name = click.argument("name", default="")


@click.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--launcher", type=click.Choice((*LAUNCHERS, *RANKS)), help="What runs the nodes (default: what is around)."
)
@click.option("--print", "printed", type=click.Choice(tuple(PRINTERS)), help="Print a scheduler's file.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for what is printed.")
@click.option("--detach", is_flag=True, help="Return when the cluster answers; it goes on without this terminal.")
@click.option("--node", default="", help="Under Slurm or torchrun: the node to become (default: that of the rank).")
@click.option("--example", is_flag=True, help="Print a file to begin with.")
@_folder
def up(
    file: Path | None,
    launcher: str | None,
    printed: str | None,
    out: Path | None,
    detach: bool,
    node: str,
    example: bool,
    folder: Path | None,
) -> int:
    """Start the cluster that FILE describes and hold it until Ctrl-C, which drains and ends it.

    Prints one line when the cluster answers. Inside `srun` or `torchrun` this process becomes one node of it.
    """
    if example:
        click.echo(EXAMPLE, nl=False)
        return FINE
    if file is None:
        raise click.UsageError("name the file of the cluster; --example prints one to begin with")
    try:
        spec = read_spec(file)
        known = [*LAUNCHERS, *RANKS, *PRINTERS]
        for section in spec.launcher:
            if section not in known:
                raise SettingsError(f"{file}: launcher.{section}: there is no such launcher{nearest(section, known)}")
        if printed is not None:
            module, function = PRINTERS[printed]
            return _write(getattr(importlib.import_module(module), function)(spec, file), out)
        launcher = launcher or scheduler_around()
        if launcher in RANKS:
            become(importlib.import_module(RANKS[launcher]).own_node(spec, folder, node))
        place = folder_of(spec.name, folder).absolute()
        refuse_running(place)
        if detach and not launcher_module(launcher).OUTLIVES:
            return leave(file, launcher, place)
        open_log("info", "text")
        return translated(partial(hold, launcher, spec, place, detach))
    except SettingsError as error:
        raise click.UsageError(str(error)) from None


@click.command()
@_name
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per node.")
@_folder
def status(name: str, folder: Path | None, as_json: bool) -> int:
    """List the nodes of the cluster NAME, of all that run without it: state, address, restarts."""
    folders = [folder_of(name, folder)] if name or folder else list(running_folders())
    if not folders:
        raise EnvironmentUnfit("no cluster runs: asyncfabric up cluster.toml")
    for place in folders:
        record = load_record(place)
        rows = translated(partial(attached, place, cluster.rows_of))
        if as_json:
            for row in rows:
                click.echo(json.dumps({"cluster": record.spec.name, **row}))
        else:
            click.echo(f"{record.spec.name}, by {record.launcher}, from {place}")
            console().print(table_of(ROWS, rows))
    return FINE


@click.command()
@_name
@click.argument("counts", nargs=-1, metavar="GROUP=COUNT...")
@_folder
def scale(name: str, counts: tuple[str, ...], folder: Path | None) -> int:
    """Start or drain nodes of the cluster NAME until so many of each named group run.

    Nodes that run go on; new ones take the lowest free numbers, and the highest numbers are drained.
    NAME can be left out when one cluster runs.
    """
    if "=" in name:
        name, counts = "", (name, *counts)
    wanted = dict(_count(one) for one in counts)
    if not wanted:
        raise click.UsageError("name the groups and how many nodes they are to have, such as decode=4")
    place = folder_of(name, folder)
    changed = translated(partial(attached, place, lambda one: cluster.scale(one, load_record(place), wanted)))
    save_record(place, changed)
    click.echo(", ".join(f"{group}: {changed.spec.nodes[group].count}" for group in wanted))
    return FINE


@click.command()
@click.argument("node")
@click.option("--name", default="", help="Cluster (default: the only one that runs).")
@_folder
def drain(node: str, name: str, folder: Path | None) -> int:
    """Have NODE finish what it has, and end; it is not restarted, and its group has one node less."""
    place = folder_of(name, folder)
    changed = translated(partial(attached, place, lambda one: cluster.drain(one, load_record(place), node)))
    save_record(place, changed)
    click.echo(f"{node} ended")
    return FINE


@click.command()
@_name
@_folder
def down(name: str, folder: Path | None) -> int:
    """Drain and end all nodes of the cluster NAME, routers first."""
    place = folder_of(name, folder)
    record = load_record(place)
    try:
        translated(partial(attached, place, lambda one: one.aclose()))
    except EnvironmentUnfit as error:
        click.echo(f"{error}", err=True)  # nothing is left to end but its record
    remove_record(place)
    click.echo(f"{record.spec.name} is down")
    return FINE


def _write(text: str | Mapping[str, str], out: Path | None) -> int:
    """Print a text; write the texts of files into the folder that was named for them."""
    if isinstance(text, str):
        click.echo(text, nl=False)
        return FINE
    if out is None:
        raise click.UsageError(f"this is {len(text)} files: name a folder for them by --out")
    for name, content in text.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content, encoding="utf-8")
    click.echo(f"{len(text)} files in {out}", err=True)
    return FINE


def _count(text: str) -> tuple[str, int]:
    group, equals, number = text.partition("=")
    if not equals or not number.isdecimal():
        raise click.UsageError(f"expected GROUP=COUNT, such as decode=4, got {text!r}")
    return group, int(number)

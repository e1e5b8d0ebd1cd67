"""`asyncfabric trace record|merge`: nodes or recordings in, one picture out. Status 2 for what is no recording."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import click

from asyncfabric.observe.trace import Recording, merge
from asyncfabric_services.exits import FINE
from asyncfabric_services.look.asking import run
from asyncfabric_services.look.places import Places, places_options
from asyncfabric_services.output_file import OutputFile
from asyncfabric_services.quantities import DurationType
from asyncfabric_services.terminal import plain
from asyncfabric_services.trace.record import record_all

MOST_SECONDS = 60.0  # as nodes accept it


@click.group()
def trace() -> None:
    """Record running nodes, and put recordings of nodes and programs together."""


@trace.command()
@places_options
@click.option("--seconds", type=DurationType(), default="5s", help="How long (default: 5s, at most 60s).")
@click.option("-o", "--output", required=True, type=OutputFile(), help="The picture, as JSON.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep the recordings in this folder.")
def record(places: Places, seconds: float, output: Path, keep: Path | None) -> int:
    """Record nodes for some seconds, all at once, and draw one trace, for ui.perfetto.dev or chrome://tracing."""
    if not 0 < seconds <= MOST_SECONDS:
        raise click.UsageError(f"--seconds must be more than 0 and at most {MOST_SECONDS:g}, got {seconds:g}")
    recordings = run(record_all, places, seconds)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(recordings):
            one.save(keep / f"{number}-{re.sub(r'[^A-Za-z0-9._-]', '_', one.name)}.json")
    output.write_text(json.dumps(merge(recordings)), encoding="utf-8")
    click.echo(summary(recordings, "nodes", output))
    for one in recordings:
        if one.gaps:
            click.echo(f"{plain(one.name)} lost events {one.gaps} times: its engine's ring was full", err=True)
    return FINE


@trace.command("merge")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", required=True, type=OutputFile(), help="The picture, as JSON.")
def merge_files(files: tuple[Path, ...], output: Path) -> int:
    """Write one trace of several files, for ui.perfetto.dev or chrome://tracing.

    Files are what `trace record` and `trace merge` write with -o, what `trace record --keep` keeps, and recordings that
    programs made.
    """
    try:
        recordings = [recording for path in files for recording in Recording.load_all(path)]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    output.write_text(json.dumps(merge(recordings)), encoding="utf-8")
    click.echo(summary(recordings, "processes", output))
    return FINE


def summary(recordings: Sequence[Recording], of: str, output: Path) -> str:
    """Return how much was drawn, and where."""
    events, spans = sum(len(one.events) for one in recordings), sum(len(one.spans) for one in recordings)
    return f"{spans} spans and {events} events of {len(recordings)} {of} in {output}"

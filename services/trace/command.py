"""`asyncfabric trace merge`: recordings in, one picture out. Status 2 when a file is no recording."""

from __future__ import annotations

import json
from pathlib import Path

import click

from asyncfabric.observe.trace import Recording, merge
from asyncfabric_services.exits import FINE


@click.group()
def trace() -> None:
    """Put recordings of fabrics together; programs make them with asyncfabric.observe.trace.Recording."""


@trace.command("merge")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The picture, as JSON."
)
def merge_files(files: tuple[Path, ...], output: Path) -> int:
    """Write one trace of several recordings, for ui.perfetto.dev or chrome://tracing."""
    try:
        recordings = [Recording.load(path) for path in files]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    output.write_text(json.dumps(merge(recordings)), encoding="utf-8")
    click.echo(f"{sum(len(one.events) for one in recordings)} events of {len(recordings)} fabrics in {output}")
    return FINE

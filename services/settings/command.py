"""`asyncfabric config show`: the settings that a service would run with, and where each came from."""

from __future__ import annotations

import json

import click

from asyncfabric_services.exits import FINE
from asyncfabric_services.settings.options import settings_options, shown
from asyncfabric_services.settings.sources import LoadedSettings


@click.group()
def config() -> None:
    """Look at the configuration of node services."""


@config.command()
@click.option("--origin", is_flag=True, help="State where each value came from.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per key.")
@settings_options()
def show(loaded: LoadedSettings, origin: bool, as_json: bool) -> int:
    """Print every setting: file < environment < flags."""
    rows = shown(loaded)
    width = max(len(row["key"]) for row in rows)
    for row in rows:
        if as_json:
            click.echo(json.dumps(row))
        else:
            value = json.dumps(row["value"])
            click.echo(f"{row['key']:<{width}}  {value:<24}  {row['origin']}" if origin else f"{row['key']} = {value}")
    return FINE

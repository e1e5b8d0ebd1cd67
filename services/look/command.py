"""`asyncfabric why`, `peers ls` and `mr ls`: options in, tables or JSON lines out. Status 3 when no node answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from asyncfabric_services.exits import FINE
from asyncfabric_services.look.asking import run
from asyncfabric_services.look.places import Places, places_options
from asyncfabric_services.look.reports import NodeReport
from asyncfabric_services.look.tables import PEERS, REGIONS, WHY, Column, console, table_of

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object per row.")


@click.command()
@places_options
@_json
def why(places: Places, as_json: bool) -> int:
    """State who waits for what on running nodes, how much of it is there, and from whom the rest must come."""
    return _show(places, "why", as_json, WHY, "nobody waits for anything")


@click.group()
def peers() -> None:
    """Look at the peers of running nodes."""


@peers.command("ls")
@places_options
@_json
def list_peers(places: Places, as_json: bool) -> int:
    """List whom each node speaks with: by its fabric (bytes) and by its control plane (messages)."""
    return _show(places, "peers", as_json, PEERS, "no node has a peer")


@click.group()
def mr() -> None:
    """Look at the registered memory of running nodes."""


@mr.command("ls")
@places_options
@_json
def list_regions(places: Places, as_json: bool) -> int:
    """List the registered regions of each node: owner, size, age, and what registering cost."""
    return _show(places, "regions", as_json, REGIONS, "no node has registered memory")


def _show(places: Places, page: str, as_json: bool, columns: Sequence[Column], nothing: str) -> int:
    rows = rows_of(run(places.ask, f"/{page}"), page)
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    elif rows:
        console().print(table_of(columns, rows))
    else:
        click.echo(nothing)
    return FINE


def rows_of(answers: Sequence[NodeReport], page: str) -> list[dict[str, Any]]:
    """Return the rows of all nodes, each with its node and role in front."""
    return [
        {"node": answer.get("node", ""), "role": answer.get("role", ""), **row}
        for answer in answers
        for row in answer.get(page, [])
    ]

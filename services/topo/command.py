"""`asyncfabric topo`: options in, a drawing out. Status 0; 3 when the tree cannot be read or nothing was compiled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from asyncfabric.observe.nvlink import read_nvlinks
from asyncfabric.observe.topology import Distance, NicKind, Topology, read_topology
from asyncfabric_services.exits import FINE, EnvironmentUnfit
from asyncfabric_services.output_file import OutputFile


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--svg", type=OutputFile(), help="Write a picture to this file.")
@click.option("--root", type=click.Path(path_type=Path), default="/", help="Read the sys and proc below this folder.")
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Copy what is read to this new folder.")
def topo(as_json: bool, svg: Path | None, root: Path, save: Path | None) -> int:
    """Draw this machine's GPUs, NICs, NUMA nodes, CPUs and NVLinks, and which NICs serve which GPU."""
    if not (root / "sys").is_dir():
        raise EnvironmentUnfit(
            f"{root} holds no folder sys: expected a copy of a machine's sys and proc, as --save makes"
        )
    if save is not None:
        from asyncfabric_services.topo.snapshot import save_tree

        try:
            count = save_tree(root, save)
        except FileExistsError:
            raise click.UsageError(f"--save: {save} is there already") from None
        click.echo(f"{count} files in {save}; draw them with: asyncfabric topo --root {save}", err=True)
    topology, links = read_topology(root), read_nvlinks(root)
    if svg is not None:
        from asyncfabric_services.topo.svg import draw_svg

        svg.write_text(draw_svg(topology, links), encoding="utf-8")
        click.echo(f"picture: {svg}", err=True)
    if as_json:
        click.echo(json.dumps(plain(topology) | {"nvlinks": dataclasses.asdict(links)}, indent=2))
    elif svg is None:
        from asyncfabric_services.topo.text import draw_text

        click.echo(draw_text(topology, links))
    return FINE


def plain(topology: Topology) -> dict[str, Any]:
    """Return a topology as JSON values; kinds and distances by name."""
    return {name: _named(value) for name, value in dataclasses.asdict(topology).items()}


def _named(value: Any) -> Any:
    if isinstance(value, NicKind):
        return value.name.lower()
    if isinstance(value, Distance):
        return value.text
    if isinstance(value, dict):
        return {name: _named(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_named(inner) for inner in value]
    return value

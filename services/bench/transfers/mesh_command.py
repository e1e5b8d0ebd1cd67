"""`asyncfabric bench mesh`: see mesh_run.py."""

from __future__ import annotations

from typing import Any

import click

from asyncfabric_services.bench.group import bench, measured, options_of
from asyncfabric_services.bench.options import device_option, fabric_options, sizes_option


@bench.command()
@fabric_options
@device_option
@click.option("--processes", type=click.IntRange(2, 64), help="Processes; default: a GPU each, or 4.")
@sizes_option("1MiB,16MiB,64MiB", "Sizes of what one process writes to another at a time.")
def mesh(sizes: tuple[int, ...], processes: int | None, **arguments: Any) -> int:
    """Measure writes of all at once, in a ring and from all to all, against send and recv of NCCL or gloo."""
    from asyncfabric_services.bench.transfers.mesh_run import run_mesh

    options = options_of(arguments | {"sizes": sizes})
    title = f"everybody at once over {options.provider}, {options.polling}"
    return measured(title, lambda report: run_mesh(options, report, processes), arguments)

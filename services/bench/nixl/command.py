"""`asyncfabric bench nixl`: options in, the table of our face beside bare calls and the real NIXL out."""

from __future__ import annotations

from typing import Any

import click

from asyncfabric_services.bench.group import bench, measured
from asyncfabric_services.bench.options import MIB, Options, shared_options

REGION_BYTES = {"host": 256 * MIB, "cuda": 1024 * MIB}


@bench.command()
@shared_options
@click.option(
    "--memory", type=click.Choice(["host", "cuda"]), default="host", show_default=True,
    help="Memory at both ends: of the host, or of the first GPU and the last one.",
)  # fmt: skip
@click.option(
    "--rails", help="Rails of ours, with commas between; with tcp, NIXL has UCX over tcp. Default: by --memory."
)
@click.option("--namespaces", help="Two network namespaces of `ip netns`, A,B: the ends run in them, for --rails tcp.")
@click.option(
    "--polls", type=click.Choice(["yield", "spin"]), default="yield", show_default=True,
    help="Between two looks the polling programs of all contenders let others have the core, or do not.",
)  # fmt: skip
@click.option(
    "--operation", type=click.Choice(["write", "read", "both"]), help="Default: write, of GPUs both.",
)  # fmt: skip
def nixl(
    memory: str, rails: str | None, namespaces: str | None, polls: str, operation: str | None, **arguments: Any
) -> int:
    """Measure our NIXL face beside our bare calls, and beside the real NIXL where it is installed."""
    from asyncfabric_services.bench.nixl.run import Workplace, run_nixl

    options = Options(**{name: value for name, value in arguments.items() if name not in ("as_json", "plot")})
    ends = tuple(namespaces.split(",")) if namespaces is not None else (None, None)
    if len(ends) != 2:
        raise click.BadParameter(f"two names are needed, A,B, got {namespaces!r}", param_hint="--namespaces")
    both = operation == "both" or (operation is None and memory == "cuda")
    place = Workplace(
        rails=tuple((rails or ("cuda:0" if memory == "cuda" else "local")).split(",")),
        memories=("cuda:0", "cuda:last") if memory == "cuda" else ("host", "host"),
        namespaces=(ends[0], ends[1]),
        operations=("WRITE", "READ") if both else ("READ",) if operation == "read" else ("WRITE",),
        spins=polls == "spin",
    )
    title = f"NIXL's interface over {','.join(place.rails)}, {memory} memory"
    return measured(title, lambda report: run_nixl(options, report, place), arguments)

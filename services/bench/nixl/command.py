"""`asyncfabric bench nixl`: options in, the table of our face beside bare calls and the real NIXL out."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from asyncfabric_services.bench.group import bench, measured
from asyncfabric_services.bench.nixl.figures import places_of
from asyncfabric_services.bench.options import MIB, Options, shared_options

if TYPE_CHECKING:
    from asyncfabric_services.bench.report.report import BenchReport

GPU_REGION_BYTES = 512 * MIB
"""Without --region: 10,000 pages of 32 KiB need more than the default."""


@bench.command()
@shared_options
@click.option(
    "--memory", type=click.Choice(["host", "cuda", "both"]), default="host", show_default=True,
    help="Memory at both ends: of the host, of the first GPU and the last one, or one after the other.",
)  # fmt: skip
@click.option(
    "--rails",
    multiple=True,
    help="Rails of ours, with commas between; a table for each --rails. With tcp, NIXL has UCX over tcp. Default: "
    "local and tcp:lo; of GPUs cuda:0.",
)
@click.option(
    "--namespaces",
    metavar="A,B|new",
    help="Two network namespaces of `ip netns`, in which the ends of tables over tcp run; `new` makes two for the run.",
)
@click.option(
    "--polls", type=click.Choice(["yield", "spin"]), default="yield", show_default=True,
    help="Between two looks the polling programs of all contenders let others have the core, or do not.",
)  # fmt: skip
@click.option(
    "--operation", type=click.Choice(["write", "read", "both"]), help="Default: write, of GPUs both.",
)  # fmt: skip
def nixl(
    memory: str, rails: tuple[str, ...], namespaces: str | None, polls: str, operation: str | None, **arguments: Any
) -> int:
    """Measure our NIXL face beside our bare calls, and beside the real NIXL where it is installed."""
    options = Options(**{name: value for name, value in arguments.items() if name not in ("as_json", "plot")})
    if memory == "both" and rails:
        raise click.BadParameter("rails of one memory; --memory both has its own", param_hint="--rails")
    ends = None if namespaces in (None, "new") else namespaces.split(",")
    if ends is not None and len(ends) != 2:
        raise click.BadParameter(f"two names are needed, A,B, or new, got {namespaces!r}", param_hint="--namespaces")
    places = places_of(memory, rails, None if ends is None else (ends[0], ends[1]), operation, polls == "spin")
    if namespaces is not None and not any(place.over_tcp for place in places):
        raise click.BadParameter("none of the tables goes over tcp", param_hint="--namespaces")
    source = click.get_current_context().get_parameter_source("region_bytes")
    if source is click.core.ParameterSource.DEFAULT and memory != "host":
        options = replace(options, region_bytes=GPU_REGION_BYTES)

    def run(report: BenchReport) -> None:
        from asyncfabric_services.bench.nixl.namespaces import CARD, cabled_namespaces
        from asyncfabric_services.bench.nixl.run import run_nixl

        with ExitStack() as stack:
            there = places
            if namespaces == "new":
                made = stack.enter_context(cabled_namespaces())
                there = [place.between(made, CARD) if place.over_tcp else place for place in places]
            run_nixl(options, report, there)

    return measured(f"NIXL's interface, {memory} memory", run, arguments)

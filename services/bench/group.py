"""The group of bench commands, and what each of them does with its options: a run, rows, an exit status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from asyncfabric_services.bench.options import Options
from asyncfabric_services.exits import CHECK_FAILED, FINE
from asyncfabric_services.quantities import format_size


@click.group()
def bench() -> None:
    """Measure real transfers between real processes, with the machine's own limits beside them."""


def measured(title: str, run: Callable[..., None], arguments: dict[str, Any]) -> int:
    """Run one bench and publish its rows; returns the exit status."""
    from asyncfabric_services.bench.report.report import BenchReport

    report = BenchReport(as_json=arguments.pop("as_json"), plot=arguments.pop("plot"), title=title)
    try:
        run(report)
    finally:
        report.close()
    report.finish()
    return CHECK_FAILED if report.failures else FINE


def options_of(arguments: dict[str, Any]) -> Options:
    """Return the run's options; raises a usage error for sizes that do not fit into the region."""
    options = Options(**{name: value for name, value in arguments.items() if name not in ("as_json", "plot")})
    if options.on_gpu:
        if options.provider != "local" or options.rails != 1 or options.engine_level:
            raise click.UsageError("--device cuda is one cuda rail: no --provider, --rails or --engine-level with it")
        options = replace(options, provider="cuda")
    if options.polling == "manual" and not options.engine_level:
        raise click.UsageError("--polling manual leaves an engine without a worker: for --engine-level only")
    for name in ("sizes", "page_sizes"):
        for size in getattr(options, name) if name in arguments else ():
            if not 1 <= size <= options.region_bytes:
                bound = format_size(options.region_bytes)
                raise click.UsageError(f"a size of {format_size(size)} does not fit into the region of {bound}")
    return options

"""`asyncfabric top`: live nodes, their rates and queues, refreshed until Ctrl-C, or once. Options in, a table out."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click
import trio
from rich.console import Group
from rich.live import Live
from rich.text import Text

from asyncfabric_services.exits import FINE
from asyncfabric_services.look.asking import run
from asyncfabric_services.look.places import Places, places_options
from asyncfabric_services.look.rates import Sample, row_of, with_lags
from asyncfabric_services.look.reports import NodeReport
from asyncfabric_services.look.sampling import sample
from asyncfabric_services.look.tables import TOP, console, table_of, update_line
from asyncfabric_services.quantities import DurationType
from asyncfabric_services.terminal import plain


@click.command()
@places_options
@click.option("--interval", type=DurationType(), default="1s", help="Between two samples (default: 1s).")
@click.option("--once", is_flag=True, help="Print one table, from two samples, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per node and sample.")
def top(places: Places, interval: float, once: bool, as_json: bool) -> int:
    """Show live nodes: peers, rates, requests, pages, versions of weights; and how the last updates of those ended."""
    if interval <= 0:
        raise click.UsageError(f"--interval must be more than 0, got {interval:g} s")
    try:
        run(_watch, places, interval, once, as_json)
    except KeyboardInterrupt:
        pass  # how a user ends it
    return FINE


async def _watch(places: Places, interval: float, once: bool, as_json: bool) -> None:
    before = await sample_all(places)
    if as_json or once:
        while True:
            await trio.sleep(interval)
            before = await _round(places, before, as_json=as_json)
            if once:
                return
    with Live(console=console(), auto_refresh=False, screen=console().is_terminal) as live:
        last: dict[str, Sample] = {}
        while True:
            rows = with_lags([row_of(last.get(url), sample) for url, sample in before.items()])
            live.update(shown(rows), refresh=True)
            last = before
            await trio.sleep(interval)
            before = await sample_all(places)


async def _round(places: Places, before: dict[str, Sample], *, as_json: bool) -> dict[str, Sample]:
    now = await sample_all(places)
    rows = with_lags([row_of(before.get(url), sample) for url, sample in now.items()])
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
    else:
        console().print(shown(rows))
    return now


def shown(rows: Sequence[NodeReport]) -> Group:
    """Return the table without columns that no node fills, and below it what became of the last updates of weights."""
    columns = [column for column in TOP if any(column[1](row) for row in rows)]
    lines = [update_line(row["node"], update) for row in rows for update in row["last_updates"]]
    return Group(table_of(columns, rows), *(Text(plain(line)) for line in lines))


async def sample_all(places: Places) -> dict[str, Sample]:
    """Return a sample of each node that answers, by its address; raises EnvironmentUnfit when none does.

    Cancellation: nothing is left over.
    """

    async def sampled(url: str) -> tuple[str, Sample]:
        return url, await sample(url, places.patience_s)

    return dict(await places.ask_each(sampled))

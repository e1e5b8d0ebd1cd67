"""`asyncfabric plan weights`: options in, a prediction out. Status 0; 2 when the numbers do not fit the model."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from asyncfabric.sim import Assumptions
from asyncfabric.weights.cards import CARDS, card
from asyncfabric_services.exits import FINE
from asyncfabric_services.plan.layout import cluster
from asyncfabric_services.plan.study import study


@click.group()
def plan() -> None:
    """Say what a cluster that you do not own would do."""


@plan.command()
@click.option("--model", type=click.Choice(sorted(CARDS)), default="kimi-k2", show_default=True)
@click.option("--train", type=click.IntRange(1), default=256, show_default=True, help="Ranks of the trainer.")
@click.option("--infer", type=click.IntRange(1), default=128, show_default=True, help="Ranks of all replicas together.")
@click.option("--stages", type=click.IntRange(1), help="Pipeline stages of the trainer.")
@click.option("--fsdp", type=click.IntRange(1), help="Ranks that cut each expert's matrices in rows.")
@click.option("--ep", type=click.IntRange(1), help="Ranks of the trainer that share the experts.")
@click.option("--replica-ranks", type=click.IntRange(1), help="Ranks of one replica; they share the experts.")
@click.option("--tp", type=click.IntRange(1), help="Ranks of a replica that share all that is no expert.")
@click.option("--fp8/--bf16", default=True, show_default=True, help="What replicas store.")
@click.option("--relay/--no-relay", default=True, show_default=True, help="Let receivers forward where that is faster.")
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="Change an assumption; repeat for several.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline as a picture.")
@click.option("--perfetto", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline as a trace.")
def weights(
    model: str,
    train: int,
    infer: int,
    stages: int | None,
    fsdp: int | None,
    ep: int | None,
    replica_ranks: int | None,
    tp: int | None,
    fp8: bool,
    relay: bool,
    assume: tuple[str, ...],
    as_json: bool,
    svg: Path | None,
    perfetto: Path | None,
) -> int:
    """Plan an update of all weights and predict how long it takes."""
    assumed = assumptions(assume)
    chosen = card(model)
    both = cluster(
        chosen, train=train, infer=infer, stages=stages, fsdp=fsdp, ep=ep, replica_ranks=replica_ranks, tp=tp, fp8=fp8
    )
    try:
        found = study(chosen, both, assumed, relay=relay)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if svg is not None:
        from asyncfabric_services.plan.picture import draw_svg

        svg.write_text(draw_svg(found.prediction, f"{model}: {train} to {infer} ranks"), encoding="utf-8")
        click.echo(f"picture: {svg}", err=True)
    if perfetto is not None:
        from asyncfabric_services.plan.perfetto import trace

        perfetto.write_text(json.dumps(trace(found.prediction, found.plan.receivers)), encoding="utf-8")
        click.echo(f"trace: {perfetto}", err=True)
    if as_json:
        click.echo(json.dumps(found.summary()))
    else:
        from asyncfabric_services.plan.text import draw_text

        click.echo(draw_text(found))
    return FINE


def assumptions(changes: tuple[str, ...]) -> Assumptions:
    """Return the defaults with `name=value` changed; raises click.UsageError for what is not known or not possible."""
    values = msgspec.to_builtins(Assumptions())
    for change in changes:
        name, sign, value = change.partition("=")
        if not sign or name not in values:
            raise click.UsageError(f"--assume {change}: expected NAME=VALUE with a name out of {', '.join(values)}")
        values[name] = value
    try:
        return msgspec.convert(values, Assumptions, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise click.UsageError(f"--assume: {error}") from None

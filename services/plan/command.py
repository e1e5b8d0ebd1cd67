"""`asyncfabric plan weights`, `plan moe` and `plan calibrate`: options in, a prediction out.

Status 0; 2 when the numbers do not fit the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from asyncfabric.sim import Assumptions
from asyncfabric.weights.plan.cards import CARDS, card
from asyncfabric_services.exits import FINE
from asyncfabric_services.output_file import OutputFile
from asyncfabric_services.plan.calibrate import calibrate
from asyncfabric_services.plan.calibrated import calibration_summary, hosts_of, measured_assumptions, read
from asyncfabric_services.plan.layout import cluster
from asyncfabric_services.plan.published import NICS, published_of
from asyncfabric_services.plan.study import Calibrated, study
from asyncfabric_services.quantities import DurationType

Assumed = TypeVar("Assumed", bound=msgspec.Struct)


@click.group()
def plan() -> None:
    """Predict what a cluster that you do not own would do."""


plan.add_command(calibrate)
calibration_option = click.option(
    "--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File of `plan calibrate`."
)


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
@click.option(
    "--skew",
    "skew_s",
    type=DurationType(),
    help="Trainers begin spread evenly over it.  [default: what a published update of this shape waited, or 10ms]",
)
@click.option(
    "--nic", type=click.Choice(sorted(NICS)), default="connectx-7", show_default=True, help="Published rates of a port."
)
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="Change an assumption; repeat for several.")
@calibration_option
@click.option(
    "--cores",
    type=click.FloatRange(0, min_open=True),
    help="Cores of each rank that do all the work, with the costs of --calibration; default: GPUs and NICs do theirs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--svg", type=OutputFile(), help="Write the timeline as a picture.")
@click.option("--perfetto", type=OutputFile(), help="Write the timeline as a trace.")
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
    skew_s: float | None,
    nic: str,
    assume: tuple[str, ...],
    calibration: Path | None,
    cores: float | None,
    as_json: bool,
    svg: Path | None,
    perfetto: Path | None,
) -> int:
    """Plan an update of all weights and predict how long it takes.

    Where others published a measured update of this shape, the output puts it beside the prediction, and trainers begin
    spread over the time that its ranks waited for each other; --skew 10ms leaves both out.
    """
    if cores is not None and calibration is None:
        raise click.UsageError("--cores needs the costs of a --calibration")
    found = None if calibration is None else read(calibration)
    measured = {} if found is None else measured_assumptions(found, cores)
    chosen = card(model)
    both = cluster(
        chosen, train=train, infer=infer, stages=stages, fsdp=fsdp, ep=ep, replica_ranks=replica_ranks, tp=tp, fp8=fp8
    )
    published = published_of(chosen, both)
    presets: dict[str, Any] = {**NICS[nic], **({} if published is None else {"skew_s": published.waiting_seconds})}
    if skew_s is not None:
        if any(change.startswith("skew_s=") for change in assume):
            raise click.UsageError("--skew and --assume skew_s= are the same: give one of them")
        assume = (*assume, f"skew_s={skew_s}")
    assumed = assumptions(assume, Assumptions, presets | measured)
    calibrated = None if found is None else Calibrated(found, measured, hosts_of(found, cores))
    try:
        result = study(chosen, both, assumed, relay=relay, calibrated=calibrated)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if svg is not None:
        from asyncfabric_services.plan.picture import draw_svg

        svg.write_text(draw_svg(result.prediction, f"{model}: {train} to {infer} ranks"), encoding="utf-8")
        click.echo(f"picture: {svg}", err=True)
    if perfetto is not None:
        from asyncfabric_services.plan.perfetto import trace

        perfetto.write_text(json.dumps(trace(result.prediction, result.plan.receivers)), encoding="utf-8")
        click.echo(f"trace: {perfetto}", err=True)
    if as_json:
        click.echo(json.dumps(result.summary()))
    else:
        from asyncfabric_services.plan.text import draw_text

        click.echo(draw_text(result))
    return FINE


@plan.command()
@click.option("--ranks", multiple=True, type=click.IntRange(2), help="Repeat for several.  [default: 16, 32, 64]")
@click.option("--node-size", type=click.IntRange(1), default=8, show_default=True, help="Ranks of one node.")
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens of each rank.")
@click.option("--hidden", type=click.IntRange(16), default=7168, show_default=True, help="Elements of a token.")
@click.option("--top-k", type=click.IntRange(1, 64), default=8, show_default=True, help="Experts of a token.")
@click.option("--experts", type=click.IntRange(1), default=256, show_default=True, help="Experts of all ranks.")
@click.option("--fp8/--bf16", default=True, show_default=True, help="What is dispatched; bf16 comes back.")
@click.option("--routings", type=click.IntRange(1), default=3, show_default=True, help="Random routings to try.")
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="Change an assumption; repeat for several.")
@calibration_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def moe(
    ranks: tuple[int, ...],
    node_size: int,
    tokens: int,
    hidden: int,
    top_k: int,
    experts: int,
    fp8: bool,
    routings: int,
    assume: tuple[str, ...],
    calibration: Path | None,
    as_json: bool,
) -> int:
    """Predict dispatch and combine of a mixture of experts between GPUs of several nodes."""
    from asyncfabric.moe import MoeConfig
    from asyncfabric.sim.moe_assumptions import MoeAssumptions
    from asyncfabric_services.plan.exchange import draw_rows, exchange_rows, summary

    found = None if calibration is None else read(calibration)
    measured = {} if found is None or found.op_us is None else {"message_us": found.op_us}
    assumed = assumptions(assume, MoeAssumptions, measured)
    counts = ranks or (16, 32, 64)
    dtype, block = ("float8_e4m3fn", 128) if fp8 else ("bfloat16", 0)
    try:
        config = MoeConfig(
            num_experts=experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens=tokens,
            ranks=counts[0],
            node_size=node_size,
            in_dtype=dtype,
            scale_block=block,
        )
        rows = exchange_rows(config, counts, assumed, routings)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    reported = summary(config, rows, assumed) | {"calibration": calibration_summary(found, measured)}
    click.echo(json.dumps(reported) if as_json else draw_rows(config, rows, assumed, measured, found))
    return FINE


def assumptions(changes: tuple[str, ...], kind: type[Assumed], measured: dict[str, Any]) -> Assumed:
    """Return the defaults, replaced by what was measured, replaced by each `name=value`.

    Raises click.UsageError for what is not known or not possible.
    """
    values = msgspec.to_builtins(kind()) | measured
    for change in changes:
        name, sign, value = change.partition("=")
        if not sign or name not in values:
            raise click.UsageError(f"--assume {change}: expected NAME=VALUE with a name out of {', '.join(values)}")
        values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise click.UsageError(f"--assume: {error}") from None

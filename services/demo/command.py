"""`asyncfabric demo`: options, signals and exit statuses. No torch in this process.

Exit statuses are those of `asyncfabric_services.exits`, and 130 or 143 when interrupted.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import time
from functools import partial
from pathlib import Path

import click
import trio

from asyncfabric_services.demo.pair.overlap import Figures
from asyncfabric_services.demo.pair.parent import DemoError, PairOutcome, PairView, run
from asyncfabric_services.demo.pair.report import JsonView, TableView, summarize
from asyncfabric_services.demo.prompts import default_lengths, jobs_of_file, jobs_of_lengths
from asyncfabric_services.demo.settings import DemoSettings, Job
from asyncfabric_services.exits import CHECK_FAILED, FINE, UNFIT
from asyncfabric_services.interruption import first_failure, run_interruptible
from asyncfabric_services.quantities import DurationType

SIZES, SMALL_SIZES = (64, 8, 512), (32, 4, 128)
"""Tokens, layers and width where no option gives them; moe runs five copies of its model."""


class Lengths(click.ParamType[tuple[int, ...]]):
    """Prompt lengths in tokens, joined by commas."""

    name = "lengths"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers."""
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r}: expected numbers of at least 1 joined by commas", param, ctx)
        return numbers


@click.command("demo")
@click.argument("what", type=click.Choice(["pair", "kv", "moe", "weights", "rl"]), default="pair")
@click.option("--provider", type=click.Choice(["local", "tcp"]), default="local", show_default=True)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Of pair: cuda computes on the first and the last GPU, over a cuda rail; of weights: one or two GPUs train.",
)
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="Checkpoint directory (safetensors).")
@click.option("--tokens", type=click.IntRange(1, 4096), help="Tokens to decode.  [default: 64; of moe 32]")
@click.option(
    "--prompt-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Prompts, split by ---."
)
@click.option("--prompt-tokens", type=Lengths(), help="Lengths of the built-in prompts, for example 7,256,1500.")
@click.option("--page-tokens", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option(
    "--chunk", type=click.IntRange(0), default=512, show_default=True, help="Tokens per prefill chunk, 0: all."
)
@click.option("--layers", type=click.IntRange(1, 256), help="Layers of the random model.  [default: 8; of moe 4]")
@click.option("--hidden", type=click.IntRange(16, 8192), help="Width of the random model.  [default: 512; of moe 128]")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Compute threads per process.")
@click.option("--deadline", type=DurationType(), default="120s", show_default=True, help="For the pages of one prompt.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--requests", type=click.IntRange(1), default=48, show_default=True, help="Of kv: at least so many.")
@click.option("--clients", type=click.IntRange(1, 256), default=6, show_default=True, help="Of kv: at a time.")
@click.option(
    "--versions", type=click.IntRange(1), help="Of weights: at least so many; of rl: so many.  [default: 6; of rl 16]"
)
@click.option("--json", "as_json", is_flag=True, help="One object per prompt (of pair), and a closing one.")
def demo_command(
    what: str,
    provider: str,
    device: str,
    model: str | None,
    tokens: int | None,
    prompt_file: Path | None,
    prompt_tokens: tuple[int, ...] | None,
    page_tokens: int,
    chunk: int,
    layers: int | None,
    hidden: int | None,
    threads: int,
    deadline: float,
    seed: int,
    requests: int,
    clients: int,
    versions: int | None,
    as_json: bool,
) -> None:
    """Move the KvCache of a real model, or its weights, between processes and compare with one process.

    pair: the first process prefills a prompt and pushes each layer's pages as they are computed; the second waits for
    the count, decodes in place, and must answer exactly as one process does.

    kv: directory, router, prefill and decode nodes answer OpenAI clients, grow, lose a node and shrink meanwhile.

    moe: four processes share the experts of a model; one is killed, the others go on without its experts.

    weights: two trainer ranks publish each version of a training, rollouts generate with it; one is killed, one joins.
    A model of its own size: of the options above, provider, device, threads, versions and json apply.

    rl: two ranks of FSDP2 learn from what an engine writes and a rule rewards; the engine takes each version.
    """
    if prompt_file is not None and prompt_tokens is not None:
        raise click.UsageError("--prompt-file and --prompt-tokens exclude each other")
    if what != "pair" and (prompt_file is not None or prompt_tokens is not None):
        raise click.UsageError("--prompt-file and --prompt-tokens are options of `demo pair`")
    if device == "cuda" and (what not in ("pair", "weights") or provider != "local"):
        raise click.UsageError(
            "--device cuda is an option of `demo pair` and `demo weights`, which take cuda rails then"
        )
    if what == "weights":
        sys.exit(_run_weights(provider, device, threads, versions or 6, as_json=as_json))
    if what == "rl":
        sys.exit(_run_learning(provider, threads, versions or 16, as_json=as_json))
    try:
        jobs = (
            jobs_of_file(prompt_file) if prompt_file else jobs_of_lengths(prompt_tokens or default_lengths(page_tokens))
        )
    except (ValueError, UnicodeDecodeError) as error:
        raise click.UsageError(str(error)) from None
    usual_tokens, usual_layers, usual_hidden = SMALL_SIZES if what == "moe" else SIZES
    tokens = tokens or usual_tokens
    settings = DemoSettings(
        provider="cuda" if device == "cuda" else provider,
        device=device,
        model=model,
        seed=seed,
        layers=layers or usual_layers,
        hidden=hidden or usual_hidden,
        page_tokens=page_tokens,
        chunk=chunk,
        new_tokens=tokens,
        pool_tokens=tokens + max(job.tokens or len(job.text.encode()) + 8 for job in jobs),
        threads=threads,
        deadline=deadline,
    )
    if what == "kv":
        sys.exit(_run_cluster(settings, requests=requests, clients=clients, as_json=as_json))
    if what == "moe":
        sys.exit(_run_moe(settings, as_json=as_json))
    sys.exit(run_demo(settings, jobs, as_json=as_json))


def _run_cluster(settings: DemoSettings, *, requests: int, clients: int, as_json: bool) -> int:
    try:
        from asyncfabric_services.demo.cluster.run import run_cluster_demo
    except ModuleNotFoundError as error:
        print(f"{error}; install it with: pip install 'asyncfabric[demo]'", file=sys.stderr)
        return UNFIT
    return run_cluster_demo(settings, requests=requests, clients=clients, as_json=as_json)


def _run_moe(settings: DemoSettings, *, as_json: bool) -> int:
    try:
        from asyncfabric_services.demo.moe.run import run_moe_demo
    except ModuleNotFoundError as error:
        print(f"{error}; install it with: pip install 'asyncfabric[demo]'", file=sys.stderr)
        return UNFIT
    return run_moe_demo(settings, as_json=as_json)


def _run_weights(provider: str, device: str, threads: int, versions: int, *, as_json: bool) -> int:
    try:
        from asyncfabric_services.demo.weights.run import run_weights_demo
        from asyncfabric_services.demo.weights.scenario import Scenario
    except ModuleNotFoundError as error:
        print(f"{error}; install it with: pip install 'asyncfabric[demo]'", file=sys.stderr)
        return UNFIT
    return run_weights_demo(
        Scenario(provider=provider, device=device, threads=threads, versions=versions), as_json=as_json
    )


def _run_learning(provider: str, threads: int, versions: int, *, as_json: bool) -> int:
    try:
        from asyncfabric_services.demo.rl.run import Learning, run_learning_demo
    except ModuleNotFoundError as error:
        print(f"{error}; install it with: pip install 'asyncfabric[demo]'", file=sys.stderr)
        return UNFIT
    return run_learning_demo(Learning(provider, versions, threads), as_json=as_json)


def run_demo(settings: DemoSettings, jobs: list[Job], *, as_json: bool) -> int:
    """Run the demo of `jobs` and show it; return the exit status."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return UNFIT
    view = JsonView() if as_json else TableView(jobs, settings)
    watch = _Watch(view)
    begin = time.monotonic()
    outcome, error, status = trio.run(_guarded, settings, jobs, watch)
    rows = watch.rows
    leaked = outcome.leaked_pages if outcome else 0
    summary = summarize(
        settings,
        rows,
        model=view.model,
        requests=len(jobs),
        leaked_pages=leaked,
        seconds=time.monotonic() - begin,
        error=error,
    )
    view.close(summary, rows)
    return status or (FINE if summary.fine else CHECK_FAILED)


class _Watch:
    """Passes everything on to a view and keeps the rows, so that an interrupted run still shows what was done."""

    def __init__(self, view: PairView) -> None:
        self.rows: list[Figures] = []
        self._view = view
        self.hello = view.hello
        self.progress = view.progress

    def answered(self, figures: Figures) -> None:
        self.rows.append(figures)
        self._view.answered(figures)


async def _guarded(settings: DemoSettings, jobs: list[Job], view: PairView) -> tuple[PairOutcome | None, str, int]:
    """Run until done, failed or interrupted; return (outcome, what went wrong, exit status if not from the outcome)."""
    failure: BaseException | None = None
    outcome: PairOutcome | None = None
    caught: signal.Signals | None = None
    try:
        outcome, caught = await run_interruptible(partial(run, settings, jobs, view))
    except* DemoError as group:
        failure = first_failure(group)
    if isinstance(failure, DemoError):
        return None, str(failure), failure.status
    if caught is not None:
        return None, f"interrupted by {caught.name}", 128 + caught
    return outcome, "", 0

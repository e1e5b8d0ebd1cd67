"""`asyncfabric bench …`: options in, a run, rows out. Exit status 1 when data or counts were wrong.

numpy and the runs themselves are imported when a command runs, not when `--help` is asked for.
"""

from __future__ import annotations

from typing import Any

import click

from asyncfabric_services.bench.group import bench, measured, options_of
from asyncfabric_services.bench.nixl import command as nixl_command
from asyncfabric_services.bench.options import PROVIDERS, device_option, fabric_options, shared_options, sizes_option
from asyncfabric_services.bench.transfers import mesh_command
from asyncfabric_services.quantities import SizeListType, SizeType, format_size

WRITE_SIZES = "64KiB,1MiB,16MiB,64MiB"
PAGE_SIZES = "4KiB,16KiB,64KiB"
PROMPT_LENGTHS = "128,256,512,1024,2048,4096,8192"
TARGET_COUNTS = "1,2,4,8,16,32,64"

__all__ = ["bench", "mesh_command", "nixl_command"]


@bench.command()
@shared_options
@device_option
@sizes_option(WRITE_SIZES, "Sizes of one copy.")
@sizes_option(PAGE_SIZES, "Sizes of a page.", "--page-bytes")
@click.option("--pages", type=click.IntRange(1), default=1024, show_default=True, help="Pages in one list.")
@click.option("--window", type=click.IntRange(1), default=16, show_default=True, help="Writes in flight.")
def limits(**arguments: Any) -> int:
    """Measure the machine's own ceilings: copies, process_vm_writev, TCP, wake-ups, bare libfabric."""
    from asyncfabric_services.bench.limits.run import run_limits

    options = options_of(arguments)
    if options.on_gpu:
        from asyncfabric_services.bench.gpu.run import run_gpu_limits

        return measured("limits of this machine's GPUs", lambda report: run_gpu_limits(options, report), arguments)
    return measured("limits of this machine", lambda report: run_limits(options, report), arguments)


@bench.command()
@fabric_options
@device_option
@sizes_option(WRITE_SIZES, "Sizes of one write.")
@click.option("--window", type=click.IntRange(1), default=16, show_default=True, help="Writes in flight.")
@click.option("--engine-level", is_flag=True, help="Drive the engine by a native loop, without Python.")
@click.option("--unawaited", type=click.IntRange(1), help="Instead: rounds of so many 1 MiB writes that nobody awaits.")
def write(unawaited: int | None, **arguments: Any) -> int:
    """Measure writes by size, and one awaited write."""
    from asyncfabric_services.bench.transfers.write_run import DEEP_BYTES, run_unawaited, run_write

    if unawaited is not None:
        arguments["sizes"] = (DEEP_BYTES,)
    options = options_of(arguments)
    title = f"writes over {options.provider}, {options.memory} memory, {options.polling}"
    if unawaited is not None:
        return measured(title, lambda report: run_unawaited(options, report, unawaited), arguments)
    if options.on_gpu:
        from asyncfabric_services.bench.gpu.run import run_gpu_write

        return measured(title, lambda report: run_gpu_write(options, report), arguments)
    return measured(title, lambda report: run_write(options, report), arguments)


@bench.command()
@fabric_options
@device_option
@sizes_option(PAGE_SIZES, "Sizes of a page.", "--page-bytes")
@click.option("--pages", type=click.IntRange(1), default=1024, show_default=True, help="Pages in one call.")
@click.option(
    "--window", type=click.IntRange(1), default=1, show_default=True, help="Calls in flight, to pages of their own."
)
@click.option("--read", "reads", is_flag=True, help="Read the pages instead of writing them.")
def pages(**arguments: Any) -> int:
    """Measure scattered pages in one call, and how long a long list keeps the event loop."""
    from asyncfabric_services.bench.transfers.pages_run import run_pages

    options = options_of(arguments)
    moved = "read" if options.reads else "written"
    title = f"pages {moved} over {options.provider}, {options.memory} memory, {options.polling}"
    return measured(title, lambda report: run_pages(options, report), arguments)


@bench.command()
@fabric_options
@device_option
def notify(**arguments: Any) -> int:
    """Measure how fast one end learns what the other did, and what being idle costs."""
    from asyncfabric_services.bench.transfers.notify_run import run_notify

    options = options_of(arguments)
    title = f"notifications over {options.provider}, {options.polling}"
    if options.on_gpu:
        from asyncfabric_services.bench.gpu.run import run_gpu_notify

        return measured(title, lambda report: run_gpu_notify(options, report), arguments)
    return measured(title, lambda report: run_notify(options, report), arguments)


@bench.command()
@fabric_options
def messages(**arguments: Any) -> int:
    """Measure messages beside signals, and beside the notes of NIXL where it is installed."""
    from asyncfabric_services.bench.transfers.messages_run import run_messages

    options = options_of(arguments)
    title = f"messages over {options.provider}, {options.polling}"
    return measured(title, lambda report: run_messages(options, report), arguments)


@bench.command()
@fabric_options
@sizes_option(TARGET_COUNTS, "Numbers of targets.", "--targets")
def scatter(sizes: tuple[int, ...], **arguments: Any) -> int:
    """Measure one call that reaches many fabrics."""
    from asyncfabric_services.bench.transfers.scatter_run import run_scatter

    if min(sizes) < 1:
        raise click.BadParameter(f"numbers of targets must be at least 1, got {min(sizes)}", param_hint="--targets")
    options = options_of(arguments)
    title = f"scatter over {options.provider}, {options.polling}"
    return measured(title, lambda report: run_scatter(options, report, sizes), arguments)


@bench.command()
@fabric_options
@device_option
@sizes_option("64KiB", "Sizes of a page of one layer.", "--page-bytes")
@click.option("--pages", type=click.IntRange(1), default=4096, show_default=True, help="Pages of one stream.")
@click.option("--layers", type=click.IntRange(1, 256), default=8, show_default=True, help="Layers of one stream.")
@click.option("--chunks", type=click.IntRange(1, 4096), default=1, show_default=True, help="Parts of the prompt.")
@click.option("--together", is_flag=True, help="Push all layers of a chunk in one call.")
def kv(layers: int, chunks: int, together: bool, **arguments: Any) -> int:
    """Measure streams of KvCache layers between two pools, and what they cost the source's event loop."""
    from asyncfabric_services.bench.kv.run import KvShape, run_kv
    from asyncfabric_services.bench.kv.workload import layout_of

    options = options_of(arguments)
    for size in options.page_sizes:
        try:
            layout_of(size, layers)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--page-bytes") from None
        if size * layers > options.region_bytes:
            raise click.BadParameter(f"{layers} pages of {format_size(size)} do not fit", param_hint="--region")
    title = f"KvCache streams over {options.provider}, {options.memory} memory, {options.polling}"
    return measured(title, lambda report: run_kv(options, report, KvShape(layers, chunks, together)), arguments)


@bench.command()
@shared_options
@click.option("--provider", type=click.Choice(PROVIDERS), default="local", show_default=True)
@sizes_option(PROMPT_LENGTHS, "Lengths of prompts.", "--prompt-tokens")
@click.option("--chunk-tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens of one pass.")
@click.option("--page-tokens", type=click.IntRange(1, 1024), default=16, show_default=True, help="Tokens of a page.")
@click.option("--layers", type=click.IntRange(1, 256), default=8, show_default=True, help="Layers of the model.")
@click.option("--hidden", type=click.IntRange(16, 16384), default=512, show_default=True, help="Width of the model.")
def ttft(sizes: tuple[int, ...], **arguments: Any) -> int:
    """Measure the time to the first token, streamed from a prefill to a decode process, against one process."""
    from asyncfabric_services.bench.kv.ttft_run import Serving, run_ttft

    if min(sizes) < 1:
        raise click.BadParameter(f"a prompt has at least 1 token, got {min(sizes)}", param_hint="--prompt-tokens")
    serving = Serving(**{name: arguments.pop(name) for name in ("layers", "hidden", "chunk_tokens", "page_tokens")})
    options = options_of(arguments)
    title = f"time to the first token over {options.provider}, chunks of {serving.chunk_tokens} tokens"
    return measured(title, lambda report: run_ttft(options, report, sizes, serving), arguments)


@bench.command()
@fabric_options
@device_option
@click.option("--processes", type=click.IntRange(1, 64), help="Ranks, a process each; default 4, or one for each GPU.")
@click.option("--tokens", "sizes", type=SizeListType(), help="Of each rank; default 128,1024, on GPUs 128,4096.")
@click.option("--hidden", type=click.IntRange(16), help="Elements of a token; default 2048, on GPUs 7168.")
@click.option("--top-k", type=click.IntRange(1, 64), default=8, show_default=True, help="Experts of a token.")
@click.option("--experts", type=click.IntRange(1), help="Experts of all ranks; default 32, on GPUs 256.")
@click.option("--private", type=click.IntRange(0), help="Tokens pushed without waiting for routes; default: its own.")
@click.option("--dtype", "dtypes", type=click.Choice(["bf16", "fp8"]), multiple=True, help="Of tokens; on GPUs.")
@click.option("--apart", is_flag=True, help="On GPUs: each rank as if on a host of its own, over --provider.")
@click.option("--node-size", type=click.IntRange(2), help="On GPUs: as if so many ranks were a host, each a node.")
def moe(
    sizes: tuple[int, ...] | None,
    device: str,
    processes: int | None,
    hidden: int | None,
    top_k: int,
    experts: int | None,
    private: int | None,
    dtypes: tuple[str, ...],
    apart: bool,
    node_size: int | None,
    **arguments: Any,
) -> int:
    """Measure dispatch and combine of a mixture of experts, against gloo, or on GPUs against the wire and NCCL."""
    from asyncfabric_services.bench.moe.shapes import shapes_of

    on_gpu = device == "cuda"
    if not on_gpu and (dtypes or apart or node_size):
        raise click.UsageError("--dtype, --apart and --node-size are for --device cuda")
    if apart and node_size:
        raise click.UsageError("--apart has one rank on each host: leave out --node-size")
    sizes = sizes or ((128, 4096) if on_gpu else (128, 1024))
    try:
        shapes = shapes_of(
            sizes, dtypes if on_gpu else ("bf16",), processes, hidden, top_k, experts, private, node_size, on_gpu=on_gpu
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    options = options_of(arguments)
    if not on_gpu:
        from asyncfabric_services.bench.moe.run import run_moe

        title = f"mixture of experts over {options.provider}, {options.polling}"
        return measured(title, lambda report: run_moe(options, report, shapes), arguments)
    from asyncfabric_services.bench.moe.gpu_run import run_moe_gpu

    hosts = [rank // (node_size or 1) for rank in range(shapes[0]["ranks"])] if apart or node_size else None
    title = f"mixture of experts among GPUs{f' apart, over {options.provider}' if hosts else ''}"
    return measured(title, lambda report: run_moe_gpu(options, report, shapes, hosts), arguments)


@bench.command()
@shared_options
@click.option("--layers", type=click.IntRange(1, 256), default=8, show_default=True, help="Layers of the model.")
@click.option("--hidden", type=click.IntRange(64, 16384), default=512, show_default=True, help="Width of the model.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=1e-6, show_default=True)
def coding(layers: int, hidden: int, learning_rate: float, **arguments: Any) -> int:
    """Train a model for --repeats steps, and measure what codings make of the weights that each step changes."""
    from asyncfabric_services.bench.weights.coding_run import CodedTraining, run_coding

    if hidden % 8:
        raise click.BadParameter(f"8 heads share the width, got {hidden}", param_hint="--hidden")
    options = options_of(arguments)
    training = CodedTraining(layers, hidden, learning_rate)
    title = f"codings of bfloat16 weights, AdamW at {learning_rate:g}"
    return measured(title, lambda report: run_coding(options, report, training), arguments)


@bench.command()
@fabric_options
@click.option("--trainers", type=click.IntRange(1, 64), default=2, show_default=True, help="Trainers, a process each.")
@click.option("--rollouts", type=click.IntRange(1, 64), default=2, show_default=True, help="Receivers, a process each.")
@click.option("--replicas", type=click.IntRange(1, 64), default=1, show_default=True, help="Replicas they make up.")
@click.option("--model", "model_bytes", type=SizeType(), default="1GiB", show_default=True, help="Bytes of a replica.")
@click.option("--side", type=click.IntRange(128), default=4096, show_default=True, help="Rows of a matrix.")
@click.option(
    "--form",
    type=click.Choice(("copy", "cast", "fp8")),
    default="copy",
    show_default=True,
    help="bf16 as it is, float32 to bf16, or bf16 to float8 in blocks.",
)
@click.option(
    "--scratch",
    "scratch_bytes",
    type=SizeType(),
    help="Bound on a trainer's memory beyond its shards; default 256MiB, on GPUs 2GiB.",
)
@click.option(
    "--chunk",
    "chunk_bytes",
    type=SizeType(),
    help="What the plan moves at once; default 4MiB, on GPUs 64MiB.",
)
@device_option
@click.option("--chain", is_flag=True, help="Trainers feed the first replica only, and each replica the next one.")
@click.option(
    "--coding",
    "codings",
    type=click.Choice(("delta", "exponent")),
    multiple=True,
    help="Used where it is measured to pay; trainers change 2 % of the weights before each update then.",
)
def weights(
    trainers: int,
    rollouts: int,
    replicas: int,
    model_bytes: int,
    side: int,
    form: str,
    scratch_bytes: int | None,
    chunk_bytes: int | None,
    chain: bool,
    codings: tuple[str, ...],
    **arguments: Any,
) -> int:
    """Measure updates of weights from trainers to replicas, against bare copies by as many copiers."""
    from asyncfabric_services.bench.weights.run import run_weights
    from asyncfabric_services.bench.weights.workload import plan_of

    if rollouts % replicas:
        raise click.UsageError(f"{replicas} replicas cannot share {rollouts} rollouts evenly")
    options = options_of(arguments)
    if options.on_gpu and codings:
        raise click.UsageError("codings are for weights in host memory: no --coding with --device cuda")
    scratch_bytes = scratch_bytes or ((2 << 30) if options.on_gpu else (256 << 20))
    chunk_bytes = chunk_bytes or ((64 << 20) if options.on_gpu else (4 << 20))
    each = side * side * (1 if form == "fp8" else 2)
    model: dict[str, Any] = {
        "trainers": trainers,
        "receivers": rollouts // replicas,
        "replicas": replicas,
        "matrices": max(2, -(-model_bytes // each) // 2 * 2),
        "side": side,
        "form": form,
        "chunk_bytes": chunk_bytes,
        "chain": chain,
    }
    try:
        plan_of(**model)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    title = f"updates of weights over {options.provider}, {options.polling}"
    return measured(title, lambda report: run_weights(options, report, model, scratch_bytes, codings), arguments)

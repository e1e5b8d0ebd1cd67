"""The scenario of the demo: a cluster starts, grows, loses a node and shrinks, while clients ask. Event loop only.

Each step waits until some more requests have ended, so it happens under load on machines of any speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from asyncfabric_services.demo.cluster.load import Load, LoadOutcome, LoadRequest
from asyncfabric_services.demo.nodes import metrics_of, open_nodes, plan_of
from asyncfabric_services.demo.prompts import jobs_of_lengths
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.launch.local import LocalLauncher
from asyncfabric_services.launch.local_node import LocalNode

LENGTHS = (12, 40, 100, 200, 400, 800)  # characters of the prompts
BETWEEN_STEPS = 6  # requests
MODEL = "demo"
LOOK_SECONDS = 0.05
FREE_SECONDS = 30.0  # until pages that are still out count as leaked

Reporter = Callable[[str], None]


@dataclass(slots=True)
class Observed:
    """What the scenario observed.

    Attributes:
        outcomes: of all requests.
        retries: attempts after the first, as the router counted them.
        leaked_pages: pages of surviving nodes that are not free although nobody asks.
        sent_bytes, open_seconds, exposed_seconds: of the streams of all prefill nodes.
        dirty_ends: nodes that were asked to end and did not end with status 0.
    """

    outcomes: list[LoadOutcome] = field(default_factory=list)
    retries: int = 0
    leaked_pages: int = 0
    sent_bytes: float = 0.0
    open_seconds: float = 0.0
    exposed_seconds: float = 0.0
    dirty_ends: list[str] = field(default_factory=list)


def asks_of(new_tokens: int) -> list[LoadRequest]:
    """Return the load: prompts of several lengths, answers of several lengths."""
    return [
        LoadRequest(job.text[:length], max(1, new_tokens >> job.id % 3))
        for job, length in zip(jobs_of_lengths(LENGTHS), LENGTHS, strict=True)
    ]


def environment_of(settings: DemoSettings) -> dict[str, str]:
    """Return the settings of the nodes as environment variables."""
    values = {
        "MODEL__NAME": MODEL,
        "MODEL__PATH": settings.model or "",
        "MODEL__LAYERS": settings.layers,
        "MODEL__HIDDEN": settings.hidden,
        "MODEL__SEED": settings.seed,
        "MODEL__THREADS": settings.threads,
        "CACHE__PAGE_TOKENS": settings.page_tokens,
        "BATCH__CHUNK_TOKENS": settings.chunk or 1 << 16,
        "CLUSTER__RAILS": settings.provider,
        "ROUTER__DEADLINE": f"{settings.deadline}s",
        "LOG__LEVEL": "warning",
    }
    return {f"ASYNCFABRIC_{name}": str(value) for name, value in values.items()}


async def play(
    settings: DemoSettings, asks: Sequence[LoadRequest], requests: int, clients: int, report: Reporter
) -> Observed:
    """Play the scenario with at least so many requests and return what became of it.

    Raises:
        BrokenError: a node did not start; the text has its log.

    Cancellation: all nodes are ended.
    """
    observed = Observed()
    async with open_nodes(environment_of(settings)) as launcher:
        await launcher.start(plan_of("directory"))
        await _start(launcher, "router", "prefill-1", "decode-1", "decode-2")
        report("1 prefill and 2 decode nodes are ready")
        load = Load(launcher.running["router"].http, MODEL, asks)
        observed.outcomes = load.outcomes
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run, clients)
            await load.until(1)
            first = load.outcomes[0]
            report(first.error or f"first answer, {first.ask.max_tokens} tokens: {first.text[:24]!r}")
            await load.until(BETWEEN_STEPS - 1)
            await _start(launcher, "prefill-2", "decode-3", "decode-4")
            report(f"grown to 2 prefill and 4 decode nodes after {len(load.outcomes)} requests")
            await load.until(BETWEEN_STEPS)
            await _until(launcher.running["decode-2"], "asyncfabric_runner_running_requests", 1)  # so that it is felt
            await launcher.kill("decode-2")
            report(f"killed decode-2 after {len(load.outcomes)} requests")
            await load.until(BETWEEN_STEPS)
            if await launcher.end("decode-3") != 0:
                observed.dirty_ends.append("decode-3")
            report(f"drained decode-3 after {len(load.outcomes)} requests: 2 decode nodes are left")
            await load.until(max(BETWEEN_STEPS, requests - len(load.outcomes)))
            load.stop()
        for node in launcher.running.values():
            await measure(node, observed)
    return observed


async def _start(launcher: LocalLauncher, *names: str) -> None:
    """Start nodes side by side; returns when the directory has all of them."""
    before = (await metrics_of(launcher.running["directory"]))["asyncfabric_directory_nodes"]
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(launcher.start, plan_of(name))
    await _until(launcher.running["directory"], "asyncfabric_directory_nodes", before + len(names))


async def _until(node: LocalNode, metric: str, least: float) -> None:
    """Return when a metric of a node is at least so high."""
    while True:
        if (await metrics_of(node))[metric] >= least:
            return
        await trio.sleep(LOOK_SECONDS)


async def measure(node: LocalNode, observed: Observed) -> None:
    """Add what a node counted; waits a while for its last pages.

    Cancellation: only this wait ends.
    """
    metrics = await metrics_of(node)
    if node.role == "router":
        observed.retries += round(sum(value for name, value in metrics.items() if "router_retries_total" in name))
    with trio.move_on_after(FREE_SECONDS):
        while pages_out(metrics):
            await trio.sleep(LOOK_SECONDS)
            metrics = await metrics_of(node)
    observed.leaked_pages += pages_out(metrics)
    observed.sent_bytes += metrics.get("asyncfabric_kv_sent_bytes_total", 0.0)
    observed.open_seconds += metrics.get("asyncfabric_kv_stream_seconds_total", 0.0)
    observed.exposed_seconds += metrics.get("asyncfabric_kv_exposed_seconds_total", 0.0)


def pages_out(metrics: dict[str, float]) -> int:
    """Return how many pages of a node are not free."""
    held = metrics.get("asyncfabric_kv_held_pages", 0.0)
    return round(held + metrics.get("asyncfabric_kv_quarantined_pages", 0.0))

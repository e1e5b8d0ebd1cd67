"""What exporting traces and metrics costs a request: two clusters, one of them exports to a receiver, asked in turns.

By hand: `python tests/bench/telemetry_cost.py --turns 9 --requests 20`. A request of the cluster that exports follows
or precedes the same one of the other, with a sampled traceparent. Turns follow each other without a gap, and each has
the CPU time of all nodes of both clusters over the same time: what a turn exports later is counted in the next one.
Prints one JSON object: milliseconds per request, of the nodes' CPU and at the client, as medians of turns, what
exporting adds, as the median of the differences and ratios within a turn, and as the ratio of the sums of all turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean, median

import openai
import trio

sys.path.insert(0, str(Path(__file__).parents[1]))
from otlp_receiver import receiving

from asyncfabric.observe.spans import new_context
from asyncfabric_services.demo.cluster.load import LoadRequest
from asyncfabric_services.demo.cluster.scenario import MODEL, asks_of, environment_of
from asyncfabric_services.demo.nodes import open_nodes, plan_of
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.launch.local import LocalLauncher

SETTINGS = DemoSettings()  # as `asyncfabric demo kv`
METRICS_MS = 10_000
"""Between two exports of metrics, where OTEL_METRIC_EXPORT_INTERVAL has 60 s, so that each turn has some."""
WARM = 6
Rows = dict[str, list[tuple[float, float]]]


def cpu_ms(launcher: LocalLauncher) -> float:
    """Return the CPU time of all nodes so far, by the clocks of their processes."""
    pids = (node.process.pid for node in launcher.running.values() if node.process is not None)
    return sum(time.clock_gettime_ns(((~pid) << 3) | 2) for pid in pids) / 1e6  # clock_getcpuclockid(3) of Linux


async def asked(client: openai.AsyncOpenAI, ask: LoadRequest) -> float:
    """Ask, and return the milliseconds until the whole answer."""
    began = time.perf_counter()
    await client.completions.create(
        model=MODEL,
        prompt=ask.prompt,
        max_tokens=ask.max_tokens,
        temperature=0,
        extra_headers={"traceparent": new_context().text()},
    )
    return (time.perf_counter() - began) * 1e3


def client_of(launcher: LocalLauncher) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{launcher.running['router'].http}/v1", api_key="unused", max_retries=0)


async def started(launcher: LocalLauncher) -> None:
    await launcher.start(plan_of("directory"))
    async with trio.open_nursery() as nursery:
        for name in ("router", "prefill-1", "decode-1"):
            nursery.start_soon(launcher.start, plan_of(name))


async def measured(turns: int, requests: int, exporting: dict[str, str]) -> Rows:
    """Return what each turn took without and with telemetry: CPU milliseconds of a request, and milliseconds of it."""
    settings, asks = environment_of(SETTINGS), asks_of(SETTINGS.new_tokens)
    rows: Rows = {"off": [], "on": []}
    async with open_nodes(settings) as off, open_nodes(settings | exporting) as on:
        launchers = {"off": off, "on": on}
        for launcher in launchers.values():
            await started(launcher)
        async with client_of(off) as client_off, client_of(on) as client_on:
            clients = {"off": client_off, "on": client_on}
            for number in range(WARM):
                for client in clients.values():
                    await asked(client, asks[number % len(asks)])
            before = {name: cpu_ms(launcher) for name, launcher in launchers.items()}
            for _ in range(turns):
                took: dict[str, list[float]] = {"off": [], "on": []}
                for number in range(requests):
                    for name in ("off", "on") if number % 2 else ("on", "off"):
                        took[name].append(await asked(clients[name], asks[number % len(asks)]))
                after = {name: cpu_ms(launcher) for name, launcher in launchers.items()}
                for name in rows:
                    rows[name].append(((after[name] - before[name]) / requests, mean(took[name])))
                before = after
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--requests", type=int, default=20)
    arguments = parser.parse_args()
    with receiving() as receiver:
        exporting = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
            "OTEL_METRIC_EXPORT_INTERVAL": str(METRICS_MS),
        }
        rows = trio.run(measured, arguments.turns, arguments.requests, exporting)
        answered = arguments.turns * arguments.requests + WARM
        facts: dict[str, float] = {
            "spans_per_request": len(receiver.spans) / answered,
            "nodes_that_sent_metrics": len(receiver.metrics),
        }
    for number, what in enumerate(("cpu_ms", "ms")):
        off, on = ([row[number] for row in rows[name]] for name in ("off", "on"))
        pairs = list(zip(off, on, strict=True))
        facts |= {f"{what}_off": median(off), f"{what}_on": median(on)}
        facts |= {f"{what}_added": median(b - a for a, b in pairs), f"{what}_ratio": median(b / a for a, b in pairs)}
        facts[f"{what}_ratio_of_sums"] = sum(on) / sum(off)
    print(json.dumps({name: round(value, 4) for name, value in facts.items()}))


if __name__ == "__main__":
    main()

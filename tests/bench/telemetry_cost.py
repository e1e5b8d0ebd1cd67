"""What exporting traces and metrics costs a request: two clusters, one of them exports to a receiver, asked in turns.

By hand: `python tests/bench/telemetry_cost.py --turns 9 --requests 20`. Prints one JSON object: CPU seconds that a
request takes of all nodes, and its seconds at the client, as medians of turns, and what exporting adds, as the median
of the ratios within a turn. Every request brings a sampled traceparent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from statistics import median

import openai
import trio

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "cluster"))
from otlp_receiver import receiving

from asyncfabric.observe.spans import new_context
from asyncfabric_services.demo.cluster.scenario import MODEL, asks_of, environment_of
from asyncfabric_services.demo.nodes import open_nodes, plan_of
from asyncfabric_services.demo.settings import DemoSettings
from asyncfabric_services.launch.local import LocalLauncher

SETTINGS = DemoSettings()  # as `asyncfabric demo kv`
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(launcher: LocalLauncher) -> float:
    """Return the CPU seconds of all nodes so far."""
    texts = (
        Path(f"/proc/{node.process.pid}/stat").read_text()
        for node in launcher.running.values()
        if node.process is not None
    )
    return sum(sum(map(int, text.rpartition(")")[2].split()[11:13])) for text in texts) * TICK_S


async def asked(launcher: LocalLauncher, requests: int) -> tuple[float, float]:
    """Ask one after the other; return (CPU seconds of the nodes, seconds here) of a request."""
    asks, cpu, began = asks_of(SETTINGS.new_tokens), cpu_s(launcher), trio.current_time()
    base = f"{launcher.running['router'].http}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0) as client:
        for number in range(requests):
            ask = asks[number % len(asks)]
            await client.completions.create(
                model=MODEL,
                prompt=ask.prompt,
                max_tokens=ask.max_tokens,
                temperature=0,
                extra_headers={"traceparent": new_context().text()},
            )
    return (cpu_s(launcher) - cpu) / requests, (trio.current_time() - began) / requests


async def measured(turns: int, requests: int, endpoint: str) -> dict[str, list[tuple[float, float]]]:
    """Return what each turn took, without and with telemetry."""
    settings = environment_of(SETTINGS)
    rows: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    async with (
        open_nodes(settings) as off,
        open_nodes(settings | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}) as on,
    ):
        launchers = {"off": off, "on": on}
        for launcher in launchers.values():
            await launcher.start(plan_of("directory"))
            async with trio.open_nursery() as nursery:
                for name in ("router", "prefill-1", "decode-1"):
                    nursery.start_soon(launcher.start, plan_of(name))
            await asked(launcher, 6)  # warm
        for turn in range(turns):
            for name in ("off", "on") if turn % 2 else ("on", "off"):
                rows[name].append(await asked(launchers[name], requests))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--requests", type=int, default=20)
    arguments = parser.parse_args()
    with receiving() as receiver:
        rows = trio.run(measured, arguments.turns, arguments.requests, receiver.address)
        facts: dict[str, float] = {"spans": len(receiver.spans), "nodes that sent metrics": len(receiver.metrics)}
    for number, what in enumerate(("cpu_s", "seconds")):
        off, on = ([row[number] for row in rows[name]] for name in ("off", "on"))
        facts |= {f"{what}_off": median(off), f"{what}_on": median(on)}
        facts[f"{what}_added"] = median(b / a for a, b in zip(off, on, strict=True)) - 1
    print(json.dumps({name: round(value, 5) for name, value in facts.items()}))


if __name__ == "__main__":
    main()

"""Nodes of a cluster with vLLM in them, on one GPU: equal tokens through the router, kills by -9, one request's trace.

Usage: python tests/gpu/vllm_nodes.py [options of --help]
The directory, the router and so many nodes of each kind are those of tests/doors/vllm_engines, whose load and kills run
here with a model of 22 layers on the GPU. Wants vLLM 0.26 and its packages; no network. Prints a JSON object for each
part; ends with 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "doors" / "vllm_engines"))

from cluster import Cluster, Served, open_cluster, preload  # type: ignore[import-not-found]
from kills import LEASE_S, TOKENS, Load, run  # type: ignore[import-not-found]
from vllm_engine import ENVIRONMENT, MODEL_FOLDER, MODULES, Job, make_model
from vllm_remote import Remote, differs

VOCABULARY = 256  # the tokens of a router without a tokenizer are bytes
PRINTABLE = range(32, 127)
FIELDS = {"allowed_token_ids": list(PRINTABLE)}
"""Answers of these alone come back from their text."""
LENGTHS = (20, 130, 400, 900, 1500, 2400)
ARGUMENTS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 1 << 30,
    "kv_transfer_config": {"kv_buffer_device": "cuda"},
}


class Reference:
    """One engine alone, which knows the right answers; used by many threads."""

    def __init__(self) -> None:
        """Start it."""
        self._engine = Remote("reference", "none")
        self._engine.ready()
        self._lock = threading.Lock()
        self._right: dict[tuple[int, ...], set[str]] = {}
        self.ties: list[float] = []

    def right(self, prompt: list[int], text: str) -> bool:
        """Return whether a text is what the engine answers; of two tokens that are equally likely either is right."""
        with self._lock:
            known = self._right.setdefault(tuple(prompt), set())
            if text in known:
                return True
            job = partial(Job, allowed=list(PRINTABLE))
            expected = self._engine.run(job(prompt, TOKENS))[0].tokens
            known.add(bytes(expected).decode())
            if text not in known and not differs(self._engine, prompt, list(text.encode()), expected, self.ties, job):
                known.add(text)
            return text in known

    def close(self) -> None:
        """End it."""
        self._engine.kill()


def random_prompt(dice: random.Random, length: int) -> list[int]:
    """Return random printable tokens."""
    return [dice.choice(PRINTABLE) for _ in range(length)]


def equal(cluster: Cluster, reference: Reference, count: int) -> dict[str, Any]:
    """Ask the router for answers to prompts of many lengths, one after the other."""
    dice, wrong, seconds = random.Random(5), [], []
    for number in range(count):
        prompt = random_prompt(dice, dice.randrange(1, 400 if number % 2 else 6000))
        begin = time.monotonic()
        text = cluster.ask(prompt, TOKENS, **FIELDS)
        seconds.append(time.monotonic() - begin)
        if not reference.right(prompt, text):
            wrong.append(len(prompt))
    for node in cluster.nodes.values():
        if node.engine:
            node.emptied()
    assert not wrong, f"wrong answers to prompts of {wrong} tokens"
    return {"answers": count, "median_s": round(statistics.median(seconds), 3), "ties": reference.ties}


def traced(cluster: Cluster, picture: Path) -> dict[str, Any]:
    """Record one request after the other, and keep the picture of all nodes."""
    dice = random.Random(6)
    events = cluster.record(picture, 3, lambda: cluster.ask(random_prompt(dice, 4000), 8, **FIELDS))
    return {"spans": sorted({event["name"] for event in events}), "bytes": picture.stat().st_size}


def killed(cluster: Cluster, reference: Reference, kills: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Kill nodes under load."""
    dice = random.Random(7)
    prompts = [random_prompt(dice, length) for length in LENGTHS]
    load = Load(cluster, prompts, lambda number, text: reference.right(prompts[number], text), FIELDS)
    found: dict[str, Any] = run(load, kills, seed, limit_s)
    return found | {"ties": [round(tie, 5) for tie in reference.ties]}


def part(name: str, measure: Callable[[], dict[str, Any]]) -> bool:
    """Run a part and print what it returns; return whether it did."""
    begin = time.monotonic()
    try:
        found = {"bench": f"vllm nodes, {name}", **measure()}
    except Exception:
        traceback.print_exc()
        found = {"bench": f"vllm nodes, {name}", "failed": True}
    print(json.dumps(found | {"part_s": round(time.monotonic() - begin, 1)}), flush=True)
    return "failed" not in found


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3, help="of each kind")
    parser.add_argument("--equal", type=int, default=20, help="prompts whose tokens are compared")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--limit", type=float, default=240, help="seconds after which nothing more is killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="file for Perfetto's picture of one request after the other")
    chosen = parser.parse_args()
    os.environ.update(ENVIRONMENT | {"PYTHONFAULTHANDLER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    multiprocessing.set_start_method("spawn")
    make_model(VOCABULARY)
    described = json.loads((Path(MODEL_FOLDER) / "config.json").read_text())
    served = Served(described, ARGUMENTS, MODULES).with_lease(LEASE_S)
    preload(served)
    names = [[f"{kind}{number}" for number in range(chosen.nodes)] for kind in ("P", "D")]
    begin = time.monotonic()
    reference = Reference()
    print(f"the reference is up after {time.monotonic() - begin:.1f} s", flush=True)
    try:
        with open_cluster(*names, served=served) as cluster:
            print(f"{2 * chosen.nodes} nodes are up after {time.monotonic() - begin:.1f} s", flush=True)
            fine = part("equal", lambda: equal(cluster, reference, chosen.equal))
            if chosen.trace:
                fine &= part("trace", lambda: traced(cluster, chosen.trace))
            if chosen.kills:
                fine &= part("kills", lambda: killed(cluster, reference, chosen.kills, chosen.seed, chosen.limit))
    finally:
        reference.close()
    return 0 if fine else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)

"""Two vLLM engines on one GPU, prefill and decode: time to the first token, equal tokens, throughput, kills.

Usage: python tests/gpu/vllm_pair.py connector|face|nixl [options of --help].
`connector` is asyncfabric.integrations.vllm, `face` vLLM's own NixlConnector over asyncfabric.integrations.nixl, `nixl`
the same over the installed NIXL. Wants vLLM 0.26 and its packages; no network. Ends with 1 if any token was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from vllm_engine import Done, Job, make_model, serve

from asyncfabric.observe.trace import merge

LENGTHS = (200, 1000, 4000, 16000)
STOCK = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
OURS = {
    "kv_connector": "Connector",
    "kv_connector_module_path": "asyncfabric.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
START_S, ANSWER_S = 180.0, 90.0
PORTS = itertools.count(5600, 10)


class Remote:
    """An engine in a process of its own."""

    def __init__(self, name: str, mode: str) -> None:
        self.name, self._mode = name, mode
        self._pipe: Connection
        self.begin()

    def begin(self) -> None:
        """Start the process; `ready` waits for it."""
        here, there = multiprocessing.Pipe()
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(PORTS))}
        connector = OURS if self._mode == "connector" else STOCK
        arguments = (self.name, environment, connector, there)
        self.process = multiprocessing.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        there.close()
        self._pipe = here

    def ready(self) -> int:
        """Wait until the engine has started; return how many blocks it has."""
        return int(self.answer(START_S))

    def submit(self, jobs: list[Job] | str) -> None:
        """Send requests without waiting for them."""
        self._pipe.send(jobs)

    def answer(self, within_s: float = ANSWER_S) -> Any:
        """Wait for the answer to the last `submit`."""
        if not self._pipe.poll(within_s):
            os.kill(self.process.pid or 0, signal.SIGABRT)  # it prints its stacks
            time.sleep(2)
            raise TimeoutError(f"{self.name} has not answered within {within_s:g} s")
        found = self._pipe.recv()
        if isinstance(found, BaseException):
            raise found
        return found

    def run(self, *jobs: Job) -> list[Done]:
        """Run requests."""
        self.submit(list(jobs))
        return list(self.answer())

    def ask(self, what: str) -> Any:
        """Send anything else than requests; return the answer."""
        self.submit(what)
        return self.answer()

    def free_blocks(self) -> int:
        """Return how many blocks no request has."""
        return int(self.ask("free blocks"))

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Pair:
    """A prefill and a decode engine, and what is measured with them."""

    def __init__(self, mode: str) -> None:
        self._names = itertools.count()
        self.mode = mode
        self.prefill, self.decode = Remote("prefill", mode), Remote("decode", mode)
        self.blocks = self.prefill.ready(), self.decode.ready()
        self.random = random.Random(3)
        self.addresses = (self.one(self.prompt(20), 1)[1].params or {}).get("asyncfabric", {}).get("addresses")

    def prompt(self, length: int) -> list[int]:
        """Return random tokens."""
        return [self.random.randrange(10, 31000) for _ in range(length)]

    def alone(self, prompt: list[int], count: int) -> tuple[Done, float]:
        """Run a prompt on one engine; return its tokens and the time to the first one."""
        begin = time.monotonic()
        done = self.prefill.run(Job(prompt, count))[0]
        return done, done.first_at - begin

    def one(self, prompt: list[int], count: int) -> tuple[Done, Done, float, float]:
        """Prefill, then decode; return both, and the time to decode's first token from its and from prefill's start."""
        begin = time.monotonic()
        first = self.prefill.run(Job(prompt, 1, KEEP))[0]
        middle = time.monotonic()
        second = self.decode.run(Job(prompt, count, first.params))[0]
        return second, first, second.first_at - middle, second.first_at - begin

    def both(self, prompt: list[int], count: int) -> tuple[Done, float]:
        """Send a prompt to both engines at once; return what decode answers, and its time to the first token."""
        name = f"pair-{os.getpid()}-{next(self._names)}"
        begin = time.monotonic()
        source = {"transfer": name, "addresses": self.addresses}
        self.decode.submit([Job(prompt, count, {"do_remote_prefill": True, "asyncfabric": source})])
        self.prefill.submit([Job(prompt, 1, {"do_remote_decode": True, "asyncfabric": {"transfer": name}})])
        self.prefill.answer()
        done: Done = self.decode.answer()[0]
        return done, done.first_at - begin

    def leaked(self) -> tuple[int, int]:
        """Return how many blocks each engine has lost, once nothing is under way."""
        for _ in range(100):
            found = self.blocks[0] - self.prefill.free_blocks(), self.blocks[1] - self.decode.free_blocks()
            if not any(found):
                break
            time.sleep(0.1)
        return found

    def close(self) -> None:
        """End both."""
        self.prefill.kill()
        self.decode.kill()


def milliseconds(values: list[float]) -> float:
    """Return the median in milliseconds."""
    return round(1e3 * statistics.median(values), 1)


def times(pair: Pair, turns: int) -> list[dict[str, Any]]:
    """Measure the time to the first token for prompts of several lengths."""
    rows = []
    for length in LENGTHS:
        apart: list[float] = []
        whole: list[float] = []
        single: list[float] = []
        overlapped: list[float] = []
        wrong = 0
        for turn in range(-1, turns):  # the first is not counted
            prompt = pair.prompt(length)
            expected, alone = pair.alone(prompt, 9)
            got, _, decode, total = pair.one(prompt, 9)
            wrong += got.tokens != expected.tokens
            both = math.nan
            if pair.addresses:
                got, both = pair.both(prompt, 9)
                wrong += got.tokens != expected.tokens
            if turn >= 0:
                single.append(alone)
                apart.append(decode)
                whole.append(total - alone)
                overlapped.append(both - alone)
        row = {
            "bench": "vllm",
            "mode": pair.mode,
            "tokens": length,
            "prefill_alone_ms": milliseconds(single),
            "decode_first_token_ms": milliseconds(apart),
            "one_after_the_other_less_prefill_ms": milliseconds(whole),
            "both_at_once_less_prefill_ms": milliseconds(overlapped) if pair.addresses else None,
            "wrong": wrong,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def equal(pair: Pair, count: int) -> dict[str, Any]:
    """Compare the tokens of prompts of 1 to 16,000 tokens with those of one engine."""
    wrong: list[int] = []
    for _ in range(count):
        length = round(math.exp(pair.random.uniform(0, math.log(16000))))
        prompt = pair.prompt(length)
        expected, _ = pair.alone(prompt, 6)
        answers = [pair.one(prompt, 6)[0]]
        if pair.addresses:
            answers.append(pair.both(prompt, 6)[0])
        wrong += [length for answer in answers if answer.tokens != expected.tokens]
    return {"bench": "vllm equal", "mode": pair.mode, "prompts": count, "wrong": len(wrong), "lengths": wrong}


def load(pair: Pair, turns: int) -> dict[str, Any]:
    """Measure decode's throughput with 16 requests in flight, alone and while transfers arrive."""
    steady = [Job(pair.prompt(200), 160) for _ in range(16)]
    ratios = []
    for turn in range(-1, turns):
        prompts = [pair.prompt(4000) for _ in range(16)]
        kept = pair.prefill.run(*(Job(prompt, 1, KEEP) for prompt in prompts))
        alone = max(done.last_at - done.first_at for done in pair.decode.run(*steady))
        arriving = [
            Job(prompt, 1, done.params, 0.1 + 0.1 * number)
            for number, (prompt, done) in enumerate(zip(prompts, kept, strict=True))
        ]
        found = pair.decode.run(*steady, *arriving)
        beside = max(done.last_at - done.first_at for done in found[:16])
        if turn >= 0:
            ratios.append(alone / beside)
    median = round(statistics.median(ratios), 3)
    return {"bench": "vllm load", "mode": pair.mode, "ratio": median, "ratios": [round(each, 3) for each in ratios]}


def kills(pair: Pair, count: int) -> dict[str, Any]:
    """Kill either engine in mid-transfer: the other goes on, with right tokens and all its blocks."""
    wrong, seconds = 0, []
    for number in range(count):
        prompt = pair.prompt(8000)
        expected, _ = pair.alone(prompt, 6)
        first = pair.prefill.run(Job(prompt, 1, KEEP))[0]
        pair.decode.submit([Job(prompt, 6, first.params)])
        time.sleep(pair.random.uniform(0, 0.03))
        begin = time.monotonic()
        if number % 2 == 0:
            pair.prefill.kill()
            got = pair.decode.answer()[0]
            seconds.append(time.monotonic() - begin)
            wrong += got.tokens != expected.tokens
            pair.prefill.begin()
            pair.prefill.ready()
        else:
            pair.decode.kill()
            wrong += pair.alone(prompt, 6)[0].tokens != expected.tokens
            seconds.append(time.monotonic() - begin)
            pair.decode.begin()
            pair.decode.ready()
        wrong += pair.one(prompt, 6)[0].tokens != expected.tokens
    leaked = pair.leaked()
    return {
        "bench": "vllm kills",
        "mode": pair.mode,
        "kills": count,
        "wrong": wrong,
        "seconds": [round(each, 2) for each in seconds],
        "leaked": leaked,
    }


def trace(pair: Pair, path: Path) -> None:
    """Write a picture for Perfetto of one request that both engines get at once."""
    engines = pair.prefill, pair.decode
    for engine in engines:
        engine.ask("begin trace")
    pair.both(pair.prompt(4000), 4)
    path.write_bytes(msgspec.json.encode(merge([engine.ask("take trace") for engine in engines])))


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("connector", "face", "nixl"))
    parser.add_argument("--turns", type=int, default=5, help="of each length, after one that is not counted")
    parser.add_argument("--equal", type=int, default=0, help="prompts whose tokens are compared")
    parser.add_argument("--load", type=int, default=0, help="turns of the throughput beside transfers")
    parser.add_argument("--kills", type=int, default=0, help="kills, of prefill and of decode in turn")
    parser.add_argument("--trace", type=Path, help="file for a picture of one request; of `connector` alone")
    parser.add_argument("--json", type=Path, help="file for the rows")
    chosen = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"
    if chosen.mode == "face":
        from asyncfabric.integrations import nixl

        sys.path.insert(0, nixl.pythonpath())  # spawned processes take this path over
    multiprocessing.set_start_method("spawn")
    make_model()
    begin = time.monotonic()
    pair = Pair(chosen.mode)
    print(f"engines are up after {time.monotonic() - begin:.1f} s, blocks {pair.blocks}", flush=True)
    rows: list[dict[str, Any]] = []
    try:
        if chosen.turns:
            rows += times(pair, chosen.turns)
        if chosen.trace and pair.addresses:
            trace(pair, chosen.trace)
        for measure, count in ((equal, chosen.equal), (load, chosen.load), (kills, chosen.kills)):
            if count:
                rows.append(measure(pair, count))
                print(json.dumps(rows[-1]), flush=True)
        leaked = pair.leaked()
        rows.append({"bench": "vllm blocks", "mode": chosen.mode, "leaked": leaked, "wrong": sum(map(abs, leaked))})
        print(json.dumps(rows[-1]), flush=True)
    finally:
        pair.close()
        if chosen.json:
            chosen.json.write_text(json.dumps(rows, indent=1))
    return 1 if any(row.get("wrong") for row in rows) else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)

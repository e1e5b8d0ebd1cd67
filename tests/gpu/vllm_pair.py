"""Two vLLM engines on one GPU, prefill and decode: time to the first token, equal tokens, throughput, kills.

Usage: python tests/gpu/vllm_pair.py connector|face|nixl... [options of --help].
`connector` is asyncfabric.integrations.vllm, `face` vLLM's own NixlConnector over asyncfabric.integrations.nixl, `nixl`
the same over the installed NIXL. Of several each gets a pair of engines, and they are measured in turn, prompt by
prompt; over the installed NIXL nothing but times. Wants vLLM 0.26 and its packages; no network. Ends with 1 if any
token was wrong or a block was lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from vllm_engine import CONNECTORS, ENVIRONMENT, MODULES, Job, make_model
from vllm_remote import KEEP, Pair, Remote

from asyncfabric.observe.trace import merge

SPARES = 3
"""Engines of each kind that start while others are killed."""
LENGTHS = (200, 1000, 4000, 16000)
WINDOW_S, WINDOWS, ARRIVALS, STEADY_TOKENS = 0.5, 5, 5, 700
"""Of the load: seconds of a window, windows with arrivals in a run, arrivals in each, tokens of the requests beside."""


def milliseconds(values: list[float]) -> float:
    """Return the median in milliseconds."""
    return round(1e3 * statistics.median(values), 1)


def times_of(pairs: Sequence[Pair], turns: int, length: int) -> list[dict[str, Any]]:
    """Measure the time to the first token for prompts of one length.

    Timed requests are of one token: vLLM, which schedules ahead, gives a first token out only after it has started the
    step of the second one.
    """
    figures: dict[str, list[tuple[float, float, float, float]]] = {pair.mode: [] for pair in pairs}
    wrong = dict.fromkeys(figures, 0)
    for turn in range(-1, turns):  # the first is not counted
        for pair in pairs:
            prompt = pair.prompt(length)
            alone = pair.alone(prompt, 1)[1]
            _, _, decode, total = pair.one(prompt, 1)
            both = pair.both(prompt, 1)[1] if pair.addresses else math.nan
            expected, _ = pair.alone(prompt, 9)
            answers = [pair.one(prompt, 9)[0], *([pair.both(prompt, 9)[0]] if pair.addresses else ())]
            wrong[pair.mode] += sum(pair.differs(prompt, got.tokens, expected.tokens) for got in answers)
            if turn >= 0:
                figures[pair.mode].append((alone, decode, total - alone, both - alone))
    rows = []
    for pair in pairs:
        alone_s, decode_s, after_s, at_once_s = map(list, zip(*figures[pair.mode], strict=True))
        rows.append(
            {
                "bench": "vllm",
                "mode": pair.mode,
                "tokens": length,
                "prefill_alone_ms": milliseconds(alone_s),
                "decode_first_token_ms": milliseconds(decode_s),
                "decode_first_token_all_ms": [round(1e3 * each, 1) for each in decode_s],
                "one_after_the_other_less_prefill_ms": milliseconds(after_s),
                "both_at_once_less_prefill_ms": milliseconds(at_once_s) if pair.addresses else None,
                "both_at_once_less_prefill_all_ms": [round(1e3 * each, 1) for each in at_once_s if each == each],
                "wrong": wrong[pair.mode],
            }
        )
    return rows


def equal(pair: Pair, count: int) -> dict[str, Any]:
    """Compare the tokens of prompts of 1 to 16,000 tokens with those of one engine."""
    wrong: list[int] = []
    for _ in range(count):
        length = round(math.exp(pair.random.uniform(0, math.log(16000))))
        prompt = pair.prompt(length)
        expected, _ = pair.alone(prompt, 6)
        pair.look_apart(prompt, expected.tokens)
        answers = [pair.one(prompt, 6)[0]]
        if pair.addresses:
            answers.append(pair.both(prompt, 6)[0])
        wrong += [length for answer in answers if pair.differs(prompt, answer.tokens, expected.tokens)]
    ties = [round(each, 5) for each in pair.ties]
    return {
        "bench": "vllm equal",
        "mode": pair.mode,
        "prompts": count,
        "wrong": len(wrong),
        "lengths": wrong,
        "ties": ties,
        "apart": None if pair.apart is None else [round(each, 5) for each in pair.apart],
        "lost": pair.lost(),
    }


def load(pair: Pair, turns: int) -> dict[str, Any]:
    """Measure decode's throughput with 16 requests in flight while transfers arrive, and between such times.

    Windows with arrivals and without follow each other, since the speed of a shared machine changes from one second to
    the next: a window is compared with the ones before and after it.
    """
    steady = [Job(pair.prompt(200), STEADY_TOKENS) for _ in range(16)]
    ratios, rates = [], []
    for turn in range(-1, turns):
        begins = [WINDOW_S * (2 + 2 * number) for number in range(WINDOWS)]
        prompts = [pair.prompt(4000) for _ in range(WINDOWS * ARRIVALS)]
        kept = pair.prefill.run(*(Job(prompt, 1, KEEP) for prompt in prompts))
        times = [begin + number * WINDOW_S / ARRIVALS for begin in begins for number in range(ARRIVALS)]
        arriving = [
            Job(prompt, 1, done.params, after) for prompt, done, after in zip(prompts, kept, times, strict=True)
        ]
        found = pair.decode.run(*steady, *arriving)
        came = [at - done.begun_at for done in found[:16] for at in done.times]
        assert max(came) > begins[-1] + 2 * WINDOW_S, "the requests beside have ended before the last window"
        if turn >= 0:
            for begin in begins:
                count = [sum(start <= at < start + WINDOW_S for at in came) for start in around(begin)]
                ratios.append(2 * count[1] / (count[0] + count[2]))
                rates.append((count[0] + count[2]) / 2 / WINDOW_S)
    return {
        "bench": "vllm load",
        "mode": pair.mode,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        "tokens_per_s": round(statistics.median(rates)),
    }


def around(begin: float) -> tuple[float, float, float]:
    """Return the begins of a window and of those beside it."""
    return begin - WINDOW_S, begin, begin + WINDOW_S


def kills(pair: Pair, count: int) -> dict[str, Any]:
    """Kill either engine at random moments of a request: the other goes on, with right tokens and all its blocks."""
    wrong, lost, seconds = 0, 0, []
    spares = {name: deque(Remote(name, pair.mode) for _ in range(SPARES)) for name in ("prefill", "decode")}
    for number in range(count):
        prompt = pair.prompt(8000)
        expected, alone = pair.alone(prompt, 6)
        at_once = pair.addresses is not None and number % 4 < 2
        if at_once:
            pair.submit_both(prompt, 6)
        else:
            pair.decode.submit([Job(prompt, 6, pair.prefill.run(Job(prompt, 1, KEEP))[0].params)])
        time.sleep(pair.random.uniform(0, alone + 0.03 if at_once else 0.03))
        begin = time.monotonic()
        killed, left = (pair.prefill, pair.decode) if number % 2 == 0 else (pair.decode, pair.prefill)
        killed.kill()
        answer = left.answer()[0].tokens if at_once or left is pair.decode else []
        seconds.append(time.monotonic() - begin)
        lost += pair.lost(left)
        killed.begin()
        spares[killed.name].append(killed)
        fresh = spares[killed.name].popleft()
        fresh.ready()
        pair.prefill, pair.decode = (fresh, left) if killed.name == "prefill" else (left, fresh)
        wrong += pair.differs(prompt, answer, expected.tokens[: len(answer)])
        wrong += pair.differs(prompt, pair.one(prompt, 6)[0].tokens, expected.tokens)
        pair.meet()
    for spare in itertools.chain(*spares.values()):
        spare.kill()
    return {
        "bench": "vllm kills",
        "mode": pair.mode,
        "kills": count,
        "wrong": wrong,
        "seconds": [round(each, 2) for each in seconds],
        "ties": [round(each, 5) for each in pair.ties],
        "lost": lost + pair.lost(),
    }


def trace(pair: Pair, path: Path, length: int) -> None:
    """Write a picture for Perfetto of one request that both engines get at once."""
    engines = pair.prefill, pair.decode
    for engine in engines:
        engine.ask("begin trace")
    pair.both(pair.prompt(length), 4)
    path.write_bytes(msgspec.json.encode(merge([engine.ask("take trace") for engine in engines])))


def on_each(pairs: Sequence[Pair], measure: Callable[[Pair], dict[str, Any]], *, beside: bool) -> list[dict[str, Any]]:
    """Run what is not timed on all pairs beside each other, or what is on one after the other."""
    with ThreadPoolExecutor(max(1, len(pairs)) if beside else 1) as pool:
        return list(pool.map(measure, pairs))


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", choices=[mode for mode in CONNECTORS if mode != "none"])
    parser.add_argument("--turns", type=int, default=5, help="of each length, after one that is not counted")
    parser.add_argument("--tokens", type=int, nargs="+", help=f"lengths of prompts, default {LENGTHS}")
    parser.add_argument("--prefill-workers", type=int, default=1, help="tensor parallel, each on a GPU of its own")
    parser.add_argument("--decode-workers", type=int, default=1, help="the same at decode")
    parser.add_argument("--equal", type=int, default=0, help="prompts whose tokens are compared")
    parser.add_argument("--load", type=int, default=0, help="turns of the throughput beside transfers")
    parser.add_argument("--kills", type=int, default=0, help="kills, of prefill and of decode in turn")
    parser.add_argument("--trace", type=Path, help="file for a picture of one request; of `connector`, one worker each")
    parser.add_argument("--json", type=Path, help="file for the rows")
    chosen = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"
    os.environ.update(ENVIRONMENT)
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload([*MODULES])
    make_model(weights=chosen.prefill_workers != chosen.decode_workers)
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    pairs = [Pair(mode, (chosen.prefill_workers, chosen.decode_workers)) for mode in chosen.modes]
    ours = [pair for pair in pairs if pair.mode != "nixl"]
    try:
        for pair in pairs:
            pair.ready()
            print(f"{pair.mode}: ready after {time.monotonic() - begin:.1f} s, {pair.decode.blocks} blocks", flush=True)
        if chosen.turns:
            for length in chosen.tokens or LENGTHS:
                show(rows, times_of(pairs, chosen.turns, length))
        if chosen.trace:
            longest = max(chosen.tokens or (4000,))
            trace(next(pair for pair in pairs if pair.addresses), chosen.trace, longest)
        if chosen.load:
            show(rows, on_each(ours, partial(load, turns=chosen.load), beside=False))
        if chosen.equal:
            show(rows, on_each(ours, partial(equal, count=chosen.equal), beside=True))
        if chosen.kills:
            for pair in set(pairs) - set(ours):
                pair.close()  # engines that start need its memory
            pairs = ours
            show(rows, on_each(ours, partial(kills, count=chosen.kills), beside=False))
        show(rows, [{"bench": "vllm blocks", "mode": pair.mode, "lost": pair.lost()} for pair in pairs])
    finally:
        for pair in pairs:
            pair.close()
        if chosen.json:
            chosen.json.write_text(json.dumps(rows, indent=1))
    return 1 if any(row.get("wrong") or row.get("lost") for row in rows) else 0


def show(rows: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    """Keep and print rows."""
    rows += more
    for row in more:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)

"""Engines of vLLM in processes of their own, and pairs of them: one that prefills, one that decodes.

What vllm_pair.py measures with; the processes run vllm_engine.py. Blocking, one thread for each pair.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from vllm_engine import Done, Job, serve

KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
START_S, ANSWER_S, BLOCKS_S = 240.0, 90.0, 20.0
TIE = 0.0015
"""Two tokens are equally likely if the logarithms of their probabilities differ by this: bf16 rounds as much, the best
two of these random weights are 0.006 apart on average."""
TIE_APART = 0.1
"""The same between engines of different numbers of workers, whose sums are rounded at other places, with weights as
transformers makes them; see `Pair.apart`."""
PORTS = itertools.count(5600, 10)


class Remote:
    """An engine in a process of its own.

    Attributes:
        blocks: of its KvCache, once it has started.
    """

    def __init__(self, name: str, mode: str, workers: int = 1) -> None:
        self.name, self._mode, self._workers = name, mode, workers
        self.blocks = 0
        self._pipe: Connection
        self.begin()

    def begin(self) -> None:
        """Start the process; `ready` waits for it."""
        here, there = multiprocessing.Pipe()
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(PORTS))}
        arguments = (self.name, environment, self._mode, self._workers, there)
        alone = self._workers == 1  # a daemon may have no processes of its own
        self.process = multiprocessing.Process(target=serve, args=arguments, daemon=alone)
        self.process.start()
        there.close()
        self._pipe = here

    def ready(self) -> None:
        """Wait until the engine has started."""
        self.blocks = int(self.answer(START_S))

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


def differs(
    alone: Remote,
    prompt: list[int],
    tokens: list[int],
    expected: list[int],
    ties: list[float],
    job: Callable[..., Job] = Job,
    tie: float = TIE,
) -> bool:
    """Return whether tokens are not the most likely ones; of two that are equally likely either is right.

    `alone` computes the prompt by itself, by requests that `job` makes. `ties` gets how far apart two tokens were where
    the ones given and the ones expected part.
    """
    known = 0
    while tokens[known:] != expected:
        if len(tokens) - known != len(expected):
            return True
        known += next(number for number, token in enumerate(expected) if tokens[known + number] != token)
        found = alone.run(job(prompt + tokens[:known], 1, likely=20))[0]
        likely = found.likely[0]
        ties.append(likely[found.tokens[0]] - likely.get(tokens[known], -math.inf))
        if ties[-1] > tie:
            return True
        known += 1
        if known == len(tokens):
            return False
        expected = alone.run(job(prompt + tokens[:known], len(tokens) - known))[0].tokens
    return False


class Pair:
    """A prefill and a decode engine of one connector.

    Attributes:
        ties: how far apart two tokens were where an answer left what the prefill engine alone gives.
        apart: the same of the decode engine alone, where it has another number of workers: what no transfer causes.
    """

    def __init__(self, mode: str, workers: tuple[int, int] = (1, 1)) -> None:
        """Start both, with so many tensor parallel workers each; `ready` waits for them."""
        self._names = itertools.count()
        self.mode = mode
        self.prefill, self.decode = Remote("prefill", mode, workers[0]), Remote("decode", mode, workers[1])
        self.random = random.Random(3)
        self.ties: list[float] = []
        self.apart: list[float] | None = None if workers[0] == workers[1] else []
        self.addresses: list[str] | None = None

    def ready(self) -> None:
        """Wait for both, and for a first request through them."""
        self.prefill.ready()
        self.decode.ready()
        self.meet()

    def meet(self) -> None:
        """Learn where the prefill engine is reached, if its connector reports it."""
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

    def submit_both(self, prompt: list[int], count: int) -> None:
        """Send a prompt to both engines at once."""
        name = f"pair-{os.getpid()}-{next(self._names)}"
        source = {"transfer": name, "addresses": self.addresses}
        self.decode.submit([Job(prompt, count, {"do_remote_prefill": True, "asyncfabric": source})])
        self.prefill.submit([Job(prompt, 1, {"do_remote_decode": True, "asyncfabric": {"transfer": name}})])

    def both(self, prompt: list[int], count: int) -> tuple[Done, float]:
        """Send a prompt to both engines at once; return what decode answers, and its time to the first token."""
        begin = time.monotonic()
        self.submit_both(prompt, count)
        self.prefill.answer()
        done: Done = self.decode.answer()[0]
        return done, done.first_at - begin

    def differs(self, prompt: list[int], tokens: list[int], expected: list[int]) -> bool:
        """Return whether tokens are not the ones that the prefill engine alone gives; see `differs`."""
        tie = TIE if self.apart is None else TIE_APART
        return differs(self.prefill, prompt, tokens, expected, self.ties, tie=tie)

    def look_apart(self, prompt: list[int], expected: list[int]) -> None:
        """Note where the decode engine alone leaves what the prefill engine alone gives, if they are not alike."""
        if self.apart is not None:
            tokens = self.decode.run(Job(prompt, len(expected)))[0].tokens
            differs(self.prefill, prompt, tokens, expected, self.apart, tie=TIE_APART)

    def lost(self, *engines: Remote) -> int:
        """Return how many blocks these engines, or both, have lost, once nothing is under way."""
        end = time.monotonic() + BLOCKS_S
        while True:
            found = sum(abs(engine.blocks - engine.free_blocks()) for engine in engines or (self.prefill, self.decode))
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def close(self) -> None:
        """End both."""
        self.prefill.kill()
        self.decode.kill()

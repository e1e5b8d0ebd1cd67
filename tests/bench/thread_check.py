"""The cost of the thread check of synchronous calls: `python tests/bench/thread_check.py`.

A script to run by hand, no test: times of a shared machine are no verdict. An empty function call stands beside the
check in its two forms, written out in the data calls and called elsewhere, and beside a whole `signal`. CPU time less
that of an empty loop, medians of interleaved rounds.
"""

from __future__ import annotations

from statistics import median
from threading import get_ident
from time import thread_time_ns

import trio

import asyncfabric as af

ROUNDS, CALLS = 5, 200_000
SIGNALS = 4_000


def empty() -> None:
    """Nothing: what any call costs."""


async def main() -> None:
    """Measure and print."""
    async with af.open_fabric(af.FabricConfig(rails=("local",))) as reader, af.open_fabric() as writer:
        peer = await writer.connect(reader.address)
        counter = reader.counter()
        dispatcher = writer._dispatcher
        check_thread = dispatcher.check_thread
        found: dict[str, list[float]] = {}

        def note(name: str, began_ns: int, calls: int) -> None:
            found.setdefault(name, []).append((thread_time_ns() - began_ns) / calls)

        for _ in range(ROUNDS):
            calls = range(CALLS)
            began = thread_time_ns()
            for _ in calls:
                pass
            note("an empty loop", began, CALLS)
            began = thread_time_ns()
            for _ in calls:
                empty()
            note("an empty call", began, CALLS)
            began = thread_time_ns()
            for _ in calls:
                if get_ident() != dispatcher.thread:
                    raise AssertionError
            note("the check, written out", began, CALLS)
            began = thread_time_ns()
            for _ in calls:
                check_thread()
            note("check_thread()", began, CALLS)
            before = counter.value
            began = thread_time_ns()
            last = None
            for number in range(SIGNALS):
                last = writer.signal(peer, counter.imm)
                if number % 64 == 63:
                    await last
            note("signal(), with its share of awaiting", began, SIGNALS)
            await counter.wait(before + SIGNALS)
        for name, times in found.items():
            loop = 0.0 if name == "an empty loop" else median(found["an empty loop"])
            print(f"{median(times) - loop:9.1f} ns  {name}")


if __name__ == "__main__":
    trio.run(main)

"""The measured process: `python -m asyncfabric_services.bench.peer KIND SOCKET`, with one of the workers of workers.py.

Receives calls and sends their results, one at a time, on a trio loop, until the coordinator closes its end.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import sys
import traceback

import trio

from asyncfabric_services.bench.worker import BenchWorker
from asyncfabric_services.bench.workers import WORKERS, Failure, Value, WorkerCall
from asyncfabric_services.children.worker import ParentPipes, take_pipes

PR_SET_PDEATHSIG = 1


async def answer(worker: BenchWorker, call: WorkerCall) -> Value | Failure:
    """Do one call and return its result; an error is one too."""
    try:
        return Value(await worker.call(call.command, call.arguments))
    except Exception as error:
        return Failure(str(error), type(error).__name__, traceback.format_exc())


async def serve(kind: str, meeting: int, pipes: ParentPipes) -> None:
    """Serve calls until the coordinator closes its end."""
    module, _, name = WORKERS[kind].partition(":")
    worker: BenchWorker = getattr(importlib.import_module(f"{__package__}.{module}"), name)(meeting)
    coordinator = pipes.channel(WorkerCall)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.beside)
            while (call := await coordinator.receive()) is not None:
                await coordinator.send(await answer(worker, call))
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await worker.aclose()
            await coordinator.aclose()


def main() -> None:
    """Run one measured process."""
    # Dies with the coordinator, also when that is killed while a native loop runs here and nobody reads stdin.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    trio.run(serve, sys.argv[1], int(sys.argv[2]), take_pipes())


if __name__ == "__main__":
    main()

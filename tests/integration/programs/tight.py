"""A process with little of something. `python tight.py VERB RAIL ...`; states in one JSON line how it went."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import time
from typing import Any

import trio

import asyncfabric as af

NOBODYS_UID = 54321


def config(rail: str) -> af.FabricConfig:
    return af.FabricConfig(rails=(rail,), connect_deadline=1.0)


async def one_write(writer: Any, target: Any) -> int:
    inbox, outbox, counter = await target.allocate(4096), await writer.allocate(4096), target.counter()
    await writer.connect(target.address)
    await writer.write(outbox[0:4096], inbox.key(access="write"), 0, imm=counter.imm)
    await counter.wait(1)
    return int(counter.value)


async def many(rail: str, most: int) -> dict[str, Any]:
    """Open fabrics that all write to the first; the error that ends this, if one does."""
    stated: dict[str, Any] = {"opened": 0, "wrote": 0, "error": "", "text": ""}
    async with contextlib.AsyncExitStack() as stack:
        try:
            target = await stack.enter_async_context(af.open_fabric(config(rail)))
            for _ in range(most):
                writer = await stack.enter_async_context(af.open_fabric(config(rail)))
                stated["opened"] += 1
                stated["wrote"] += await one_write(writer, target)
        except af.FabricError as error:
            stated |= {"error": type(error).__name__, "text": str(error)}
    return stated


async def threads(rail: str) -> list[dict[str, Any]]:
    """Open one fabric with room for no thread, one, two ... until it opens; as a user who is not root."""
    await one_fabric(rail)  # what is loaded late is loaded now: another user may not read it
    if os.getuid() == 0:
        os.setuid(NOBODYS_UID)
    tries = []
    for most in range(1, 16):
        resource.setrlimit(resource.RLIMIT_NPROC, (most, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
        try:
            await one_fabric(rail)
        except af.FabricError as error:
            tries.append({"error": type(error).__name__, "text": str(error)})
        except Exception as error:
            tries.append({"error": type(error).__name__, "text": repr(error)})
        else:
            tries.append({"error": "", "text": ""})
            break
    return tries


async def one_fabric(rail: str) -> None:
    async with af.open_fabric(config(rail)):
        pass


async def fork(rail: str) -> dict[str, Any]:
    """Fork with a connected fabric; the child tries all kinds of calls, the parent goes on."""
    async with af.open_fabric(config(rail)) as target, af.open_fabric(config(rail)) as writer:
        await one_write(writer, target)
        outbox, inbox, counter = await writer.allocate(4096), await target.allocate(4096), target.counter()
        key = inbox.key(access="write")
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            faulthandler.dump_traceback_later(15)
            calls = {
                "statistics": writer.statistics,
                "write": lambda: writer.write(outbox[0:64], key, 0, imm=counter.imm),
                "counter": target.counter,
                "value": lambda: counter.value,
                "spin": lambda: counter.spin(1, time.monotonic() + 5),
                "key": inbox.key,
            }
            stated: dict[str, str] = {}
            for name, call in calls.items():
                try:
                    stated[name] = repr(call())
                except Exception as error:
                    stated[name] = f"{type(error).__name__}: {error}"
            await writer.aclose()  # waits for nobody
            os.write(writing, json.dumps(stated).encode())
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # noqa: ASYNC222 - one task, and the engine has threads of its own
        os.close(writing)
        with os.fdopen(reading) as pipe:
            reported = pipe.read()
        await writer.write(outbox[0:64], key, 0, imm=counter.imm)
        await counter.wait(1)
        return {"status": status, "child": json.loads(reported or "{}"), "arrived": counter.value}


def main(verb: str, rail: str, *rest: str) -> None:
    reported = trio.run({"many": many, "threads": threads, "fork": fork}[verb], rail, *map(int, rest))
    print(json.dumps(reported))


if __name__ == "__main__":
    main(*sys.argv[1:])

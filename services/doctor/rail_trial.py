"""The child of trials.py: two fabrics with one rail each, one write with an immediate, checked bytes, a JSON answer.

The fabrics have a secret where those of nodes on this machine have one.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from typing import Any

import trio

import asyncfabric as af

LENGTH = 4096
DEADLINE_S = 15.0


async def one_write(rail: str, admission: str) -> dict[str, Any]:
    """Write once and return what arrived. Cancellation: both fabrics are closed."""
    config = af.FabricConfig(rails=(rail,), secret=secrets.token_bytes(32) if admission == "secret" else None)
    async with af.open_fabric(config) as target, af.open_fabric(config) as source:
        (opened,) = source.rails
        stated: dict[str, Any] = {"rail_device": opened.device, "library": opened.library, "version": opened.version}
        stated["admission"] = opened.admission
        inbox, outbox = await target.allocate(LENGTH), await source.allocate(LENGTH)
        payload = secrets.token_bytes(LENGTH)
        memoryview(outbox)[:] = payload
        counter = target.counter()
        key = inbox.key(access="write")
        await source.connect(target.address)
        started = time.perf_counter()
        with trio.move_on_after(DEADLINE_S) as scope:
            await source.write(outbox[0:LENGTH], key, 0, imm=counter.imm)
            await counter.wait(1)
        stated |= {"seconds": time.perf_counter() - started, "imm_arrived": counter.value == 1}
        if scope.cancelled_caught:
            stated["error"] = f"no arrival within {DEADLINE_S:g} s"
        elif bytes(memoryview(inbox)) != payload:
            stated["error"] = "the bytes that arrived differ"
        return stated


def main(rail: str, admission: str) -> None:
    """Try, and print the answer."""
    try:
        stated = trio.run(one_write, rail, admission)
    except af.FabricError as error:
        stated = {"error": str(error.args[0]), "remedy": error.remedy}  # str(error) would have the remedy too
    print(json.dumps(stated))


if __name__ == "__main__":
    main(*sys.argv[1:])
